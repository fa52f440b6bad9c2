"use strict";
// The page of one run or of several: curves by uPlot, all else as SVG, tables and text made here.
// Texts of files become text nodes, never markup.

let runs = JSON.parse(document.getElementById("contents").textContent).runs;
const COLOURS = ["#2a78d6", "#d1622b", "#2f9e62", "#9b5fc0", "#c9a227", "#4fb0c6", "#c2497a", "#7a7f87"];
const CAUSES = { training: "#2f9e62", lost: "#c0392b", data: "#c9a227", saving: "#2a78d6", evaluating: "#4fb0c6",
  starting: "#9b5fc0", down: "#7b241c", other: "#8b9097" };
const FIRST = ["loss", "grad_norm", "learning_rate", "tokens_per_second", "step_seconds", "mfu", "peak_memory_bytes"];
const WHOLE = Array.from({ length: 40 }, (_, place) => [1, 2, 5][place % 3] * 10 ** Math.floor(place / 3));
const HIDDEN = new Set(["tokens", "consumed_samples"]);
const smoothing = document.getElementById("smoothing");
const logarithmic = document.getElementById("logarithmic");
const axis = document.getElementById("axis");
let charts = [];

function element(name, given = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(given)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function shape(name, given, text) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(given)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

const colour = (run) => COLOURS[run % COLOURS.length];
const last = (values) => values.findLast((value) => value !== null);

function number(value) {
  if (value === undefined || value === null) return "–";
  if (value !== 0 && (Math.abs(value) >= 1e9 || Math.abs(value) < 1e-3)) return Number(value.toPrecision(4)).toExponential();
  return Number.isInteger(value) ? value.toLocaleString("en") : String(Number(value.toPrecision(5)));
}

function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return `${unit ? value.toFixed(1) : value} ${units[unit]}`;
}

function table(head, rows) {
  const body = rows.map((row) => element("tr", {}, ...row.map((cell) => element("td", {}, cell))));
  const top = element("tr", {}, ...head.map((cell) => element("th", {}, cell)));
  return element("div", { class: "scrolls" }, element("table", {}, element("thead", {}, top), element("tbody", {}, ...body)));
}

// Mean with weights that fall by `factor` a step; a gap stays a gap.
function smoothed(values, factor) {
  let sum = 0, weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    sum = factor * sum + value;
    weight = factor * weight + 1;
    return sum / weight;
  });
}

// Where the points of a curve lie: at their steps, or at the tokens that were trained until then.
function places(run, steps) {
  const tokens = run.curves.tokens;
  if (axis.value === "step" || !tokens) return steps;
  const known = tokens[0].map((step, place) => [step, tokens[1][place]]);
  let at = 0;
  return steps.map((step) => {
    while (at + 1 < known.length && known[at + 1][0] <= step) at += 1;
    const [before, value] = known[at];
    if (step <= before || at + 1 === known.length) return step === before ? value : value * step / Math.max(before, 1);
    const [after, next] = known[at + 1];
    return value + (next - value) * (step - before) / (after - before);
  });
}

function draw(name, lines, wide) {
  const joined = uPlot.join(lines.map((line) => [line.x, line.y]));
  const holder = element("div", { class: wide ? "chart wide" : "chart" }, element("h3", {}, name.replaceAll("_", " ")));
  document.getElementById("charts").append(holder);
  const isBytes = name.endsWith("bytes");
  const spelled = (value) => (isBytes && value !== null && value !== undefined ? bytes(value) : number(value));
  const series = lines.map((line) => ({
    label: line.label, stroke: line.colour, width: line.width, dash: line.dash, spanGaps: true,
    points: { show: line.points || line.x.length < 30, size: 5 }, value: (_, value) => spelled(value),
  }));
  const isLog = logarithmic.checked && name.includes("loss");
  const positive = joined.slice(1).every((values) => values.every((value) => value === null || value === undefined || value > 0));
  const text = getComputedStyle(document.body).color;
  const sides = { stroke: text, grid: { stroke: "#8883", width: 1 }, ticks: { stroke: "#8883" } };
  const chart = new uPlot({
    width: holder.clientWidth - 18, height: wide ? 340 : 210, series: [{ label: axis.value }, ...series],
    scales: { x: { time: false }, y: { distr: isLog && positive ? 3 : 1 } },
    axes: [{ ...sides, size: 30, incrs: WHOLE },
      { ...sides, size: isBytes ? 88 : 70, values: (_, marks) => marks.map((mark) => (mark === null ? "" : spelled(mark))) }],
    cursor: { sync: { key: "page" }, drag: { x: true, y: false } },
  }, joined, holder);
  charts.push({ chart, holder });
}

function linesOf(name) {
  const lines = [];
  runs.forEach((run, place) => {
    const curve = run.curves[name];
    if (!curve || !curve[0].length) return;
    const x = places(run, curve[0]), factor = Number(smoothing.value);
    const label = runs.length > 1 ? run.name : name.replaceAll("_", " ");
    const isSmooth = factor > 0 && curve[0].length >= 30 && name !== "learning_rate";
    if (isSmooth) lines.push({ x, y: curve[1], colour: colour(place) + "50", width: 1, label: `${label}, each step` });
    lines.push({ x, y: isSmooth ? smoothed(curve[1], factor) : curve[1], colour: colour(place), width: 1.8, label });
  });
  return lines;
}

function evaluations() {
  const lines = [];
  runs.forEach((run, place) => Object.entries(run.evaluations).forEach(([name, [steps, losses]], which) => {
    const label = runs.length > 1 ? `${run.name}: ${name}` : name;
    const shade = runs.length > 1 ? colour(place) : colour(which + 1);
    lines.push({ x: places(run, steps), y: losses, colour: shade, width: 1, dash: [4, 3], points: true, label });
  }));
  return lines;
}

function drawCharts() {
  charts.forEach(({ chart, holder }) => { chart.destroy(); holder.remove(); });
  charts = [];
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.curves)))].filter((name) => !HIDDEN.has(name));
  const rest = names.filter((name) => !FIRST.includes(name)).sort();
  for (const name of [...FIRST.filter((first) => names.includes(first)), ...rest]) {
    const lines = linesOf(name);
    if (name === "loss") lines.push(...evaluations());
    const varies = lines.some((line) => new Set(line.y).size > 1) || FIRST.includes(name);
    if (lines.length && varies) draw(name, lines, name === "loss");
  }
  const largest = runs.map((run, place) => ({ run, place })).filter(({ run }) => run.experts);
  if (largest.length) {
    draw("largest load of an expert, in means of its layer", largest.map(({ run, place }) => (
      { x: places(run, run.experts.largest[0]), y: run.experts.largest[1], colour: colour(place), width: 1.5, label: run.name })));
  }
  runs.filter((run) => run.rank_seconds).forEach((run) => {
    const { steps, seconds } = run.rank_seconds, few = Math.min(seconds[0].length, 16);
    draw(`own seconds of ${few} ranks, ${run.name}`, Array.from({ length: few }, (_, rank) => (
      { x: places(run, steps), y: seconds.map((row) => row[rank]), colour: colour(rank), width: 1, label: `rank ${rank}` })));
  });
}

function overview() {
  const rows = runs.map((run, place) => {
    const curve = (name) => run.curves[name] ? last(run.curves[name][1]) : undefined;
    const steps = run.curves.loss ? run.curves.loss[0].at(-1) : undefined;
    const seconds = run.ledger?.seconds ? Object.values(run.ledger.seconds).reduce((sum, each) => sum + each, 0) : 0;
    const goodput = seconds ? `${(100 * (run.ledger.seconds.training || 0) / seconds).toFixed(1)} %` : "–";
    const swatch = element("span", { class: "swatch", style: `background:${colour(place)}` });
    const validation = Object.values(run.evaluations)[0];
    return [element("span", {}, swatch, run.name), number(steps), number(curve("loss")),
      validation ? number(last(validation[1])) : "–", number(curve("tokens_per_second")),
      curve("mfu") === undefined ? "–" : `${(100 * curve("mfu")).toFixed(1)} %`,
      curve("peak_memory_bytes") ? bytes(curve("peak_memory_bytes")) : "–", goodput, run.health?.phase ?? "–"];
  });
  const head = ["run", "step", "loss", "evaluated", "tokens/s", "MFU", "peak memory", "goodput", "last seen"];
  document.getElementById("runs").replaceChildren(table(head, rows));
}

// The grid of ranks: a column of boxes for each stage, a box for each replica, its tp x cp ranks inside.
function grid(sizes) {
  const { tp, cp, dp, pp } = sizes, inner = tp * cp, cell = 30, most = { stages: 16, replicas: 8, ranks: 16 };
  const stages = Math.min(pp, most.stages), replicas = Math.min(dp, most.replicas), ranks = Math.min(inner, most.ranks);
  const columns = Math.min(ranks, 8), lines = Math.ceil(ranks / columns);
  const width = Math.max(columns * cell + 12, 76), height = lines * cell + 24, gap = 14;
  const svg = shape("svg", { width: stages * (width + gap) + 70, height: replicas * (height + gap) + 40, role: "img" });
  svg.append(shape("title", {}, `ranks: dp ${dp}, cp ${cp}, tp ${tp}, pp ${pp}`));
  for (let stage = 0; stage < stages; stage += 1) {
    const x = stage * (width + gap);
    svg.append(shape("text", { x, y: 12 }, `stage ${stage}`));
    for (let replica = 0; replica < replicas; replica += 1) {
      const y = 20 + replica * (height + gap);
      svg.append(shape("rect", { x, y, width, height, rx: 5, fill: "none", stroke: colour(replica), "stroke-width": 1.5 }));
      svg.append(shape("text", { x: x + 6, y: y + 14 }, `replica ${replica}`));
      for (let place = 0; place < ranks; place += 1) {
        const left = x + 6 + (place % columns) * cell, top = y + 18 + Math.floor(place / columns) * cell;
        const rank = (stage * dp + replica) * inner + place;
        const box = shape("rect", { x: left + 1, y: top + 1, width: cell - 2, height: cell - 2, rx: 3,
          fill: colour(replica), "fill-opacity": 0.25 });
        box.append(shape("title", {}, `rank ${rank}: stage ${stage}, replica ${replica}, cp ${Math.floor(place / tp)}, tp ${place % tp}`));
        svg.append(box, shape("text", { x: left + cell / 2, y: top + cell / 2 + 4, "text-anchor": "middle" }, rank));
      }
    }
  }
  const cut = [[pp > stages, `${pp} stages`], [dp > replicas, `${dp} replicas`], [inner > ranks, `${inner} ranks a box`]];
  const left = cut.filter(([isCut]) => isCut).map(([, text]) => text).join(", ");
  const all = dp * tp * pp * cp;
  const note = `dp ${dp} × tp ${tp} × pp ${pp} × cp ${cp} = ${all} rank${all === 1 ? "" : "s"}${left ? `; drawn is a part of ${left}` : ""}`;
  return element("div", {}, element("p", {}, note), element("div", { class: "scrolls" }, svg));
}

function schedule({ name, step, rows, bubble_rate: bubble }) {
  const end = Math.max(...rows.map((row) => row.at(-1)[4])), width = 1100, height = 26;
  const shades = { F: "#2a78d6", B: "#2f9e62", W: "#c9a227" };
  const svg = shape("svg", { viewBox: `0 0 ${width + 70} ${rows.length * (height + 6)}`, style: "width:100%;min-width:700px", role: "img" });
  rows.forEach((row, stage) => {
    const y = stage * (height + 6);
    svg.append(shape("text", { x: 0, y: y + 17 }, `stage ${stage}`));
    row.forEach(([kind, chunk, microBatch, start, stop]) => {
      const x = 66 + start / end * width, wide = (stop - start) / end * width;
      const box = shape("rect", { x, y, width: Math.max(wide - 0.6, 0.4), height, fill: shades[kind] ?? "#888", "fill-opacity": chunk % 2 ? 0.6 : 0.9 });
      box.append(shape("title", {}, `${kind}${microBatch}, chunk ${chunk}: ${((stop - start) * 1000).toFixed(2)} ms`));
      svg.append(box);
      if (wide > 24) svg.append(shape("text", { x: x + wide / 2, y: y + 17, "text-anchor": "middle" }, `${kind}${microBatch}`));
    });
  });
  return element("div", {}, element("p", {}, `${name}, step ${step} as it ran: ${(end * 1000).toFixed(1)} ms, bubble ${(100 * bubble).toFixed(1)} %`),
    element("div", { class: "scrolls" }, svg));
}

function ledger({ seconds }) {
  const all = Object.values(seconds).reduce((sum, each) => sum + each, 0);
  const parts = Object.entries(seconds).filter(([, each]) => each > 0).sort((one, other) => other[1] - one[1]);
  const bar = parts.map(([cause, each]) => element("div", { style: `width:${100 * each / all}%;background:${CAUSES[cause] ?? "#888"}`, title: cause }));
  const legend = parts.map(([cause, each]) => element("span", {},
    element("span", { class: "swatch", style: `background:${CAUSES[cause] ?? "#888"}` }), `${cause} ${each.toFixed(1)} s (${(100 * each / all).toFixed(1)} %)`));
  return element("div", {}, element("div", { class: "bar" }, ...bar), element("div", { class: "legend" }, ...legend));
}

// What was measured is written when the run ends: until then, and where it was killed, there is only what was expected.
function forecast({ expected, measured = {} }) {
  const step = expected.step_seconds;
  const rows = [["seconds a step", step ? `${number(step.low)} to ${number(step.high)}` : "not known", number(measured.step_seconds)],
    ["peak memory", bytes(expected.memory.bytes), measured.memory_of ? `${bytes(measured.peak_memory_bytes)} (${measured.memory_of})` : number()]];
  const owners = Object.entries(expected.memory.by_owner).filter(([, size]) => size > 0);
  const parts = owners.map(([owner, size], place) => element("div", { style: `width:${100 * size / expected.memory.bytes}%;background:${colour(place)}`, title: owner }));
  const legend = owners.map(([owner, size], place) => element("span", {},
    element("span", { class: "swatch", style: `background:${colour(place)}` }), `${owner} ${bytes(size)}`));
  const traffic = [];
  for (const [name, collectives] of Object.entries(expected.traffic ?? {})) {
    for (const [collective, size] of Object.entries(collectives)) {
      const seen = measured.traffic?.[name]?.[collective];
      traffic.push([name, collective, number(size), number(seen)]);
    }
  }
  const parts2 = traffic.length ? [element("h3", {}, "Bytes of a step on the main rank"), table(["axis", "collective", "expected", "measured"], traffic)] : [];
  return element("div", {}, table(["", "expected", "measured"], rows), element("p", {}, `Memory expected of stage ${expected.memory.stage}:`),
    element("div", { class: "bar" }, ...parts), element("div", { class: "legend" }, ...legend), ...parts2);
}

// Blue below the mean of the layer, red above it, gold where an expert had no token.
function experts({ layers, ratio, steps }) {
  const columns = ratio[0].length, size = Math.max(4, Math.min(28, Math.floor(1000 / columns)));
  const svg = shape("svg", { width: columns * size + 60, height: layers.length * size + 24, role: "img" });
  ratio.forEach((row, layer) => {
    svg.append(shape("text", { x: 0, y: layer * size + size / 2 + 4 }, `layer ${layers[layer]}`));
    row.forEach((value, expert) => {
      const strength = Math.min(1, Math.abs(Math.log2(Math.max(value, 1e-3))) / 2);
      const fill = value === 0 ? "gold" : value > 1 ? `rgba(192,57,43,${strength})` : `rgba(42,120,214,${strength})`;
      const box = shape("rect", { x: 58 + expert * size, y: layer * size, width: size - 1, height: size - 1, fill, stroke: "#8883" });
      box.append(shape("title", {}, `layer ${layers[layer]}, expert ${expert}: ${value} times the mean`));
      svg.append(box);
    });
  });
  return element("div", {}, element("p", {}, `Tokens of each expert against the mean of its layer, steps ${steps[0]} to ${steps[1]}; red is more, blue is less, gold is none.`),
    element("div", { class: "scrolls" }, svg));
}

function folded(title, child) {
  return element("details", {}, element("summary", {}, title), child);
}

function attempt(parts, title, make) {
  try {
    const made = make();
    if (made) parts.push(...(title ? [element("h3", {}, title)] : []), made);
  } catch (error) {
    parts.push(element("p", {}, `${title || "a part"} is not shown: its file is not what a run writes (${error.message})`));
  }
}

function detail(run, place) {
  const parts = [element("h2", {}, element("span", { class: "swatch", style: `background:${colour(place)}` }), run.name)];
  attempt(parts, "Layout", () => run.layout && grid(run.layout));
  attempt(parts, "Where the time went", () => run.ledger?.seconds && ledger(run.ledger));
  attempt(parts, "Expected and measured", () => run.forecast && forecast(run.forecast));
  attempt(parts, "Schedule", () => run.schedule && schedule(run.schedule));
  attempt(parts, "Experts", () => run.experts && experts(run.experts));
  attempt(parts, "Events", () => run.events.length && element("ol", { class: "events" }, ...run.events.map(
    ({ step, text }) => element("li", {}, element("b", {}, `step ${step}`), text))));
  attempt(parts, "", () => run.audit && folded("Audit of the chats", element("pre", {}, run.audit)));
  attempt(parts, "", () => run.first_lines.length && folded("First lines", element("pre", {}, run.first_lines.join("\n"))));
  const settings = Object.entries(run.config).map(([section, fields]) => `[${section}]\n${
    Object.entries(fields).map(([name, value]) => `${name} = ${JSON.stringify(value)}`).join("\n")}`).join("\n\n");
  attempt(parts, "", () => settings && folded("Configuration", element("pre", {}, settings)));
  return element("article", {}, ...parts);
}

function differences() {
  if (runs.length < 2) return [];
  const flat = runs.map((run) => Object.fromEntries(Object.entries(run.config).flatMap(([section, fields]) => (
    Object.entries(fields).map(([name, value]) => [`${section}.${name}`, JSON.stringify(value)])))));
  const names = [...new Set(flat.flatMap(Object.keys))].filter((name) => new Set(flat.map((fields) => fields[name])).size > 1);
  const rows = names.filter((name) => name !== "log.run_dir").map((name) => [name, ...flat.map((fields) => fields[name] ?? "–")]);
  return rows.length ? [element("h2", {}, "Where the configurations differ"), table(["", ...runs.map((run) => run.name)], rows)] : [];
}

function drawAll() {
  overview();
  drawCharts();
  document.getElementById("details").replaceChildren(...differences(), ...runs.map(detail));
}

smoothing.addEventListener("input", drawCharts);
logarithmic.addEventListener("change", drawCharts);
axis.addEventListener("change", drawCharts);
addEventListener("resize", () => charts.forEach(({ chart, holder }) => chart.setSize({ width: holder.clientWidth - 18, height: chart.height })));
drawAll();

// A page that is served while a run trains asks again; a file that was opened has no server.
if (document.documentElement.dataset.every) {
  const every = Number(document.documentElement.dataset.every);
  document.getElementById("note").textContent += ` It is drawn again every ${every} seconds while you do not touch it.`;
  setInterval(async () => {
    if (document.hidden || charts.some(({ chart }) => chart.cursor.left >= 0)) return;
    try {
      const answer = await fetch("contents.json");
      if (!answer.ok) return;
      ({ runs } = await answer.json());
      drawAll();
    } catch { /* the server has ended: what is drawn stays */ }
  }, 1000 * every);
}

// Which accesses to memory are wrong, and at which line?
//
// Kernels are compiled with -fsanitize=thread and linked without its library: the compiler calls __tsan_read4(address)
// and the like before each access, and they are ours. Every byte of a tensor or of shared memory has a cell that knows
// who wrote it last and who has read it since. Two accesses of different threads, one of them a write, race unless
// something orders them: the end of a launch, __syncthreads between threads of a block, or __syncwarp of a whole warp
// between its lanes. Shuffles and the order of blocks do not.
#include "checker.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "cuda.h"
#include "fiber.h"
#include "scheduler.h"

namespace emulator::checker {
namespace {

// A thread between two of its barriers. Number 0 is nobody.
struct Moment {
  unsigned launch = 0, block = 0, epoch = 0, warp_epoch = 0;
  int thread = 0;
};

// How far the readers of a byte are from each other: what has to come before a write to it.
enum Reach : uint8_t { kThread, kWarp, kBlock, kGrid };

struct Cell {
  uint32_t writer = 0, reader = 0;  // moments
  uint32_t writer_line = 0, reader_line = 0;  // addresses of code, from the beginning of the library
  Reach reach = kThread;
};

struct Region {
  std::string name;
  char* data;
  size_t bytes;
  Use use;
  bool shared;  // a new one for each block
  std::vector<Cell> cells;

  // The difference wraps around for an address before the data.
  bool contains(const char* address, size_t size) const {
    const size_t offset = static_cast<size_t>(address - data);
    return offset < bytes && size <= bytes - offset;
  }
  size_t distance(const char* address) const {
    return static_cast<size_t>(address < data ? data - address : address - data - bytes + 1);
  }
};

struct Image {  // of this library in memory
  char *begin, *end;
  Range thread_local_storage;
};

std::vector<Region> regions;
std::vector<Moment> moments(1);
std::vector<uint32_t> moment_of;  // thread -> its moment, 0 before its first access in it
std::vector<unsigned> warp_epochs;
unsigned launch_number, block_number, epoch;
int at_work;
bool watching;  // a kernel's thread has its turn
Range parameters;
const Stacks* stacks;
Image image;
thread_local char anchor;

int read_program_header(dl_phdr_info* info, size_t, void*) {
  char *begin = nullptr, *end = nullptr;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& segment = info->dlpi_phdr[i];
    auto* at = reinterpret_cast<char*>(info->dlpi_addr + segment.p_vaddr);
    if (segment.p_type == PT_LOAD && begin == nullptr) begin = at;
    if (segment.p_type == PT_LOAD) end = at + segment.p_memsz;
  }
  auto* here = reinterpret_cast<char*>(&read_program_header);
  if (here < begin || here >= end) return 0;
  image = {begin, end, {}};
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& segment = info->dlpi_phdr[i];
    if (segment.p_type == PT_TLS) image.thread_local_storage = {info->dlpi_tls_data, segment.p_memsz};
  }
  return 1;
}

void find_image() {
  *const_cast<volatile char*>(&anchor) = 0;  // the storage is made when it is first used
  dl_iterate_phdr(read_program_header, nullptr);
}

uint32_t offset_of(const void* code) { return static_cast<uint32_t>(static_cast<const char*>(code) - image.begin); }

// "rows.h:41 in softmax.cu:77": the innermost line, and those that it was inlined into.
std::string place_of(uint32_t code) {
  Dl_info info;
  if (dladdr(reinterpret_cast<void*>(&find_image), &info) == 0) return "?";
  char command[4096];
  std::snprintf(command, sizeof command, "addr2line -s -i -e '%s' 0x%x 2>/dev/null", info.dli_fname, code - 1);
  std::string places;
  const std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen(command, "r"), pclose);
  char line[512];
  while (pipe != nullptr && std::fgets(line, sizeof line, pipe.get()) != nullptr) {
    line[std::strcspn(line, " \n")] = 0;
    places += (places.empty() ? "" : " in ") + std::string(line);
  }
  return places;
}

bool same_warp(const Moment& a, const Moment& b) { return a.thread / warpSize == b.thread / warpSize; }

// Whether all readers, one of which is `then` and the others within `reach` of it, are through before `now`.
bool ordered(const Moment& then, Reach reach, const Moment& now) {
  if (then.launch != now.launch) return true;
  if (reach == kGrid || then.block != now.block) return false;
  if (then.epoch != now.epoch) return true;
  if (reach == kBlock) return false;
  if (reach == kThread && then.thread == now.thread) return true;
  return same_warp(then, now) && then.warp_epoch != now.warp_epoch;
}

Reach between(const Moment& a, const Moment& b) {
  if (a.block != b.block) return kGrid;
  if (!same_warp(a, b)) return kBlock;
  return a.thread == b.thread ? kThread : kWarp;
}

uint32_t now() {
  uint32_t& moment = moment_of[at_work];
  if (moment == 0) {
    moment = static_cast<uint32_t>(moments.size());
    moments.push_back({launch_number, block_number, epoch, warp_epochs[at_work / warpSize], at_work});
  }
  return moment;
}

[[noreturn]] void fail_at(const std::string& finding, uint32_t code) { fail(finding + ", at " + place_of(code)); }

[[noreturn]] void fail_race(const Region& region, const char* does, const char* did, const Moment& other,
                            uint32_t other_line, uint32_t code) {
  const std::string block = other.block == block_number ? "" : " of another block";
  fail_at("race: " + std::string(does) + " " + region.name + ", which thread " + std::to_string(other.thread) + block +
              " " + did + " at " + place_of(other_line) + " with no barrier between",
          code);
}

void check_byte(Region& region, Cell& cell, bool writes, uint32_t code) {
  const uint32_t moment = now();
  const Moment& here = moments[moment];
  if (region.shared && cell.writer != 0 && moments[cell.writer].block != block_number) cell = Cell();
  if (region.shared && cell.reader != 0 && moments[cell.reader].block != block_number) cell = Cell();
  if (cell.writer != 0 && cell.writer != moment && !ordered(moments[cell.writer], kThread, here)) {
    fail_race(region, writes ? "writes" : "reads", "wrote", moments[cell.writer], cell.writer_line, code);
  }
  if (writes) {
    if (cell.reader != 0 && !ordered(moments[cell.reader], cell.reach, here)) {
      fail_race(region, "writes", "read", moments[cell.reader], cell.reader_line, code);
    }
    cell = {moment, 0, code, 0, kThread};
    return;
  }
  if (cell.writer == 0 && region.use != Use::kUpdated) {
    fail_at("uninitialised read: nobody has written this byte of " + region.name, code);
  }
  if (cell.reader == 0 || ordered(moments[cell.reader], cell.reach, here)) {
    cell.reader = moment, cell.reader_line = code, cell.reach = kThread;
  } else {
    cell.reach = std::max(cell.reach, between(moments[cell.reader], here));
  }
}

std::string does(bool writes, size_t size) {
  return (writes ? "writes " : "reads ") + std::to_string(size) + " bytes";
}

[[noreturn]] void fail_bounds(const char* address, size_t size, bool writes, uint32_t code) {
  const Region* nearest = nullptr;
  for (const Region& region : regions) {
    const bool nearer = nearest == nullptr || region.distance(address) < nearest->distance(address);
    if (region.bytes > 0 && nearer) nearest = &region;
  }
  std::string where = "no tensor is near";
  if (nearest != nullptr) {
    const auto from_begin = address - nearest->data;
    where = "at byte " + std::to_string(from_begin) + " of " + nearest->name + ", which has " +
            std::to_string(nearest->bytes);
  }
  fail_at("out of bounds: " + does(writes, size) + " " + where, code);
}

void check(const void* pointer, size_t size, bool writes, bool aligned, const void* caller) {
  if (!watching) return;
  const char* address = static_cast<const char*>(pointer);
  if (stacks->contain(address) || (address >= image.begin && address < image.end)) return;
  if (static_cast<size_t>(address - static_cast<const char*>(parameters.data)) < parameters.bytes) return;
  static size_t last;  // most accesses go where the one before them went
  if (last >= regions.size() || !regions[last].contains(address, size)) {
    for (last = 0; last < regions.size() && !regions[last].contains(address, size); ++last) {
    }
  }
  const uint32_t code = offset_of(caller);
  if (last == regions.size()) fail_bounds(address, size, writes, code);
  Region& region = regions[last];
  if (aligned && reinterpret_cast<uintptr_t>(address) % size != 0) {
    fail_at("misaligned: " + does(writes, size) + " at byte " + std::to_string(address - region.data) + " of " +
                region.name + ", at an address that is no multiple of them",
            code);
  }
  if (region.use == Use::kInput) {
    if (writes) fail_at("write to an input: " + region.name, code);
    return;
  }
  const size_t first = static_cast<size_t>(address - region.data);
  for (size_t i = first; i < first + size; ++i) check_byte(region, region.cells[i], writes, code);
}

void add(const char* name, const void* data, size_t bytes, Use use, bool shared) {
  auto* address = static_cast<char*>(const_cast<void*>(data));
  regions.push_back({name, address, bytes, use, shared, std::vector<Cell>(use == Use::kInput ? 0 : bytes)});
}

void forget_shared() {
  while (!regions.empty() && regions.back().shared) regions.pop_back();
}

}  // namespace

void open() {
  regions.clear();
  moments.resize(1);
}

void announce(const char* name, void* data, size_t bytes, Use use) {
  if (use == Use::kOutput || use == Use::kScratch) std::memset(data, 0xff, bytes);  // NaN in every format
  add(name, data, bytes, use, false);
}

void close() {
  forget_shared();
  for (const Region& region : regions) {
    if (region.use != Use::kOutput) continue;
    for (size_t i = 0; i < region.bytes; ++i) {
      if (region.cells[i].writer != 0) continue;
      const std::string text = "never written: byte " + std::to_string(i) + " of " + region.name + ", which has " +
                               std::to_string(region.bytes);
      regions.clear();
      throw std::runtime_error(text);
    }
  }
  regions.clear();
}

void begin_launch(Range kernel_parameters, Range dynamic_shared, const Stacks* all_stacks) {
  find_image();
  parameters = kernel_parameters, stacks = all_stacks;
  ++launch_number;
  forget_shared();
  add("dynamic shared memory", dynamic_shared.data, dynamic_shared.bytes, Use::kScratch, true);
  add("static shared memory", image.thread_local_storage.data, image.thread_local_storage.bytes, Use::kScratch, true);
}

void begin_block() {
  ++block_number;
  epoch = 0;
  moment_of.assign(Stacks::kCount, 0);
  warp_epochs.assign(Stacks::kCount / warpSize, 0);
  for (Region& region : regions) {
    if (region.shared && region.bytes > 0) std::memset(region.data, 0xff, region.bytes);
  }
}

void begin_turn(int thread) {
  at_work = thread;
  watching = true;
}

void end_turn() { watching = false; }

void order_block() {
  ++epoch;
  moment_of.assign(Stacks::kCount, 0);
}

void order_warp(int warp) {
  ++warp_epochs[warp];
  std::fill_n(moment_of.begin() + warp * warpSize, warpSize, 0);
}

}  // namespace emulator::checker

// What the compiler calls.
#define EMULATOR_WATCH(name, size, writes, aligned)                                                   \
  extern "C" void __tsan_##name(void* address) {                                                      \
    emulator::checker::check(address, size, writes, aligned, __builtin_return_address(0));            \
  }
#define EMULATOR_WATCH_SIZE(size)                          \
  EMULATOR_WATCH(read##size, size, false, true)            \
  EMULATOR_WATCH(write##size, size, true, true)            \
  EMULATOR_WATCH(unaligned_read##size, size, false, false) \
  EMULATOR_WATCH(unaligned_write##size, size, true, false)
EMULATOR_WATCH_SIZE(1)
EMULATOR_WATCH_SIZE(2)
EMULATOR_WATCH_SIZE(4)
EMULATOR_WATCH_SIZE(8)
EMULATOR_WATCH_SIZE(16)

extern "C" void __tsan_read_range(void* address, size_t size) {
  emulator::checker::check(address, size, false, false, __builtin_return_address(0));
}
extern "C" void __tsan_write_range(void* address, size_t size) {
  emulator::checker::check(address, size, true, false, __builtin_return_address(0));
}
extern "C" void __tsan_init() {}
extern "C" void __tsan_func_entry(void*) {}
extern "C" void __tsan_func_exit() {}

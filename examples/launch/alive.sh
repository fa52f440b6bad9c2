#!/bin/bash
# Liveness probe: alive.sh RUN_DIR/health.json SECONDS. Status 1 when no step has ended for so many seconds.
# A run rewrites the file after its steps, at most once a second. Starting takes time too: what counts is the later of
# the file's time and the container's start, so SECONDS must be more than a start and the longest evaluation or save.
# Pods without the file (all except that of rank 0, unless they share a disk) are judged by the rank 0 pod alone.
set -eu
[ -e "$1" ] || exit 0
last=$(stat -c %Y "$1")
# Process 1 began so many ticks after the machine did; its name, in brackets, may hold blanks.
proc=${PROC:-/proc}
ticks=$(sed 's/.*) //' "$proc/1/stat" | cut -d ' ' -f 20)
begun=$(($(sed -n 's/^btime //p' "$proc/stat") + ticks / $(getconf CLK_TCK)))
[ "$last" -gt "$begun" ] || last=$begun
[ $(($(date +%s) - last)) -le "$2" ]

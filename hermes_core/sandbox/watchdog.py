"""The watchdog: every sandbox's main process, in POSIX sh, which ends the sandbox when no driver is left.

The guest rewrites the heartbeat file with a new number whenever it hears from the driver. The guest itself may be
killed, so it is not what the sandbox's life hangs on: this is, and it needs nothing but `sh` and `sleep`.
"""

from __future__ import annotations

import math

START_GRACE_S = 5.0
"""Seconds that a sandbox may live before its first heartbeat, however short its time to live: a guest has to start."""

END = "end"
"""What the heartbeat file holds when the sandbox is to end at once."""

# Arguments: this script, the file, hundredths of a second without news before the end, and after the first news; then
# what it keeps when it starts itself again: hundredths without news so far, the last heartbeat, the last clock.
# What is not obvious:
# - A shell that can't fork (a process limit that a slot has filled) gives up. So an exit that was not meant starts the
#   script again by `exec`, which needs no fork: a fork bomb must not end the sandbox, nor keep it for ever.
# - The clock is /proc/uptime, which a `read` reads. A leap (the machine was suspended) counts as one look.
# - Sleeping in the background lets TERM through at once; waiting also reaps orphans, as process 1 must.
# - An empty file is one that is being rewritten: no news.
_SCRIPT = """
code=$1 file=$2 tick=$3 limit=$4 ttl=$5 idle=$6 beat=$7 clock=$8
trap 'exec /bin/sh -c "eval \\"\\$1\\"" "$0" "$code" "$file" "$tick" "$limit" "$ttl" "$idle" "$beat" "$clock"' EXIT
trap 'trap - EXIT; kill "$!"; wait "$!"; exit 0' TERM
trap '' HUP INT
while :; do
  now= up=
  read -r now <"$file"
  read -r up rest </proc/uptime
  before=$clock clock=${up%.*}${up#*.}
  clock=${clock:-$((before + tick))}
  step=$((clock - ${before:-$clock}))
  if [ "$step" -gt $((tick * 30)) ]; then step=$tick; fi
  if [ "$now" = end ]; then break; fi
  if [ -n "$now" ] && [ "$now" != "$beat" ]; then
    beat=$now idle=0 limit=$ttl
  else
    idle=$((idle + step))
    if [ "$idle" -ge "$limit" ]; then break; fi
  fi
  sleep $((tick / 100)).$((tick / 10 % 10))$((tick % 10)) &
  wait "$!"
done 2>/dev/null
trap - EXIT
exit 0
"""


def watchdog_command(heartbeat_path: str, ttl_s: float) -> tuple[str, ...]:
    """Return the command that runs until the heartbeat stops.

    It ends when the contents of `heartbeat_path` have not changed for `ttl_s` seconds, at once when they are `END` or
    on TERM, and when the file has not appeared within the start-up grace.
    """
    tick = _hundredths(min(1.0, ttl_s / 5))
    # Before the first heartbeat nobody else sees to the end, which a whole look more would make late.
    limits = (_hundredths(max(ttl_s, START_GRACE_S)) - tick, _hundredths(ttl_s))
    arguments = (_SCRIPT, heartbeat_path, str(tick), *map(str, limits), "0", "", "")
    return ("/bin/sh", "-c", 'eval "$1"', "hermes-watchdog", *arguments)


def _hundredths(seconds: float) -> int:
    return max(1, math.ceil(seconds * 100))

"""The watchdog: the main process of every sandbox, in POSIX sh. It ends the sandbox when no driver is left.

The guest writes a new number to the heartbeat file when the driver sends something. The guest itself may be killed, so
the sandbox's life depends on this process instead, which needs only `sh` and `sleep`.
"""

from __future__ import annotations

import math

START_GRACE_S = 5.0
"""The minimum time in seconds until the first heartbeat, even if the time to live is shorter: a guest has to start."""

END = "end"
"""The content of the heartbeat file that ends the sandbox at once."""

# Arguments: this script, the file, the time between two looks, the longest time until the first heartbeat, and the
# longest time between later heartbeats. Then its state, for when it restarts itself: the time without a heartbeat so
# far, the last heartbeat, the last clock. Times are in hundredths of a second.
# Notes:
# - A shell that can't fork (because a slot has filled a process limit) exits. So an unintended exit restarts the script
#   by `exec`, which needs no fork: a fork bomb must neither end the sandbox nor keep it for ever.
# - The clock is /proc/uptime, read by `read`. A jump (the machine was suspended) counts as one look.
# - The sleep runs in the background so that TERM takes effect at once; `wait` also reaps orphans, as process 1 must.
# - An empty file is being rewritten, and is no new heartbeat.
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

    The command ends when the content of `heartbeat_path` has not changed for `ttl_s` seconds, or the file has not
    appeared in the time for the first heartbeat. It ends at once when the content is `END`, and on TERM.
    """
    tick = _hundredths(min(1.0, ttl_s / 5))
    # The first limit is one look shorter, because before the first heartbeat nothing else ends the sandbox in time.
    limits = (_hundredths(max(ttl_s, START_GRACE_S)) - tick, _hundredths(ttl_s))
    arguments = (_SCRIPT, heartbeat_path, str(tick), *map(str, limits), "0", "", "")
    return ("/bin/sh", "-c", 'eval "$1"', "hermes-watchdog", *arguments)


def _hundredths(seconds: float) -> int:
    return max(1, math.ceil(seconds * 100))

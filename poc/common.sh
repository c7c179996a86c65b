# What the two walk-throughs share; sourced, not run.
set -euo pipefail

repository=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
# The Python that has fairflare: that of `make run`, or the one of an active environment.
if [ -z "${VIRTUAL_ENV:-}" ] && [ -x "$repository/.venv/bin/python" ]; then
  PATH="$repository/.venv/bin:$PATH"
fi
python=$(command -v python)
if ! command -v fairflare > /dev/null; then
  echo "fairflare is not installed in $python: run 'make run' first, or activate the environment that has it" >&2
  exit 2
fi

# Everything is written here and nowhere else; `nvflare` keeps its settings in the home folder, so it gets another one.
folder=$(mktemp -d "${TMPDIR:-/tmp}/fairflare-walk.XXXXXX")
export HOME="$folder/home"
# FLARE and PyTorch leave folders there; a short path, as a socket in it may have 107 characters at most.
TMPDIR=$(mktemp -d /tmp/fairflare-tmp.XXXXXX)
export TMPDIR
mkdir "$HOME"
cd "$folder"
# The sites share this machine's cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# How long FLARE waits, after a run has ended, for the last word of a silent site.
export NVFLARE_CLIENT_OUTCOME_WAIT_TIMEOUT=10
# Every process that is started inherits this mark; by it they are found and ended, these and no others.
export FAIRFLARE_WALK="$$-$RANDOM$RANDOM"

clean_up() {
  status=$?
  trap - EXIT INT TERM
  "$python" "$repository/poc/end_processes.py" FAIRFLARE_WALK "$FAIRFLARE_WALK"
  cd /
  rm -rf "$TMPDIR"
  if [ -n "${KEEP:-}" ]; then
    echo "kept: $folder"
  else
    rm -rf "$folder"
  fi
  exit "$status"
}
trap clean_up EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

step() { printf '\n== %s (%s s)\n' "$*" "$SECONDS"; }

free_ports() { # two ports of the loopback interface that nobody listens on
  "$python" - <<'END'
import socket
sockets = [socket.socket() for _ in range(2)]
for s in sockets:
    s.bind(("127.0.0.1", 0))
print(*(s.getsockname()[1] for s in sockets))
END
}

# FLARE's commands may hang when they close a connection that began before the server was there; by then they have said
# what they had to say, so they get a time to end.
within() { timeout --foreground -k 5 "$@"; } # SECONDS COMMAND

wait_for_sites() { # PATTERN COUNT [OPTIONS]: until so many different sites are connected
  local pattern=$1 count=$2 connected=""
  shift 2
  for _ in $(seq 60); do
    connected=$(within 60 nvflare system status "$@" 2>/dev/null || true)
    if [ "$(grep -oE "$pattern" <<<"$connected" | sort -u | wc -l)" -eq "$count" ]; then
      echo "$connected"
      return
    fi
    sleep 3
  done
  echo "only these sites are connected: $connected" >&2
  return 1
}

submit() { # JOB-FOLDER [OPTIONS]: its id
  local said
  said=$(nvflare job submit -j "$@" 2>&1) || { echo "$said" >&2; return 1; }
  awk '/job_id/ {print $2; exit}' <<<"$said"
}

same_model() { # A B: the two model files hold the same bits
  "$python" - "$1" "$2" <<'END'
import sys
import torch
one, other = (torch.load(path, map_location="cpu", weights_only=True)["model"] for path in sys.argv[1:])
assert one.keys() == other.keys(), "other tensors"
different = [name for name in one if not torch.equal(one[name], other[name])]
assert not different, f"{len(different)} of {len(one)} tensors differ, the first: {different[0]}"
print(f"the same bits in {len(one)} tensors")
END
}

same_figures() { # A B: the two results say the same of the sites, who is behind, and of groups of people
  "$python" - "$1" "$2" <<'END'
import json
import sys
one, other = (json.load(open(path, encoding="utf-8")) for path in sys.argv[1:])
tested = [[cell for cell in of["cells"] if (cell["model"], cell["split"]) == ("last", "test")] for of in (one, other)]
figures = [sorted(json.dumps(cell, sort_keys=True) for cell in cells) for cells in tested]
assert figures[0] == figures[1], f"other figures: {sorted({*figures[0]} ^ {*figures[1]})[:4]}"
assert one["inequality"] == other["inequality"], "other sites are behind"
told = [cell["group"] for cell in tested[0] if cell.get("metric") == "accuracy" and not cell.get("site")
        and cell.get("group", "=")[-1] != "=" and "=" in cell["group"] and cell.get("value") is not None]
assert len(told) > 1, "no two groups have a figure"
print(f"the same figures of {', '.join(told)}")
END
}

#!/usr/bin/env bash
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
diff train.py train_fair.py || true   # what a script needs
python job.py
fairflare show simulator/fed_lwr

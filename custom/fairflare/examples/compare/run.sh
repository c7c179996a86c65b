#!/usr/bin/env bash
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# Your own images instead: point data at a folder that `fairflare prepare` wrote, and leave this line out.
data=data
[ -d "$data" ] || fairflare phantom prostate --sites 3 --size 32 --out "$data"

fairflare check-data "$data"
fairflare stats --data "$data" --out stats --overwrite
fairflare compare fed_avg fed_lwr --data "$data/fairflare.json" --rounds 2 --seeds 2 --out comparison \
  --set image_size=[32,32] --set features=[4,4,8,8,8,4] --set local_epochs=1
fairflare report comparison --out report --overwrite

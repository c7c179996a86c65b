#!/usr/bin/env bash
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
# In your environment: pip install -e . ; this does without: it writes what the entry points are, and puts the folder on the path.
python -c "import setuptools; setuptools.setup()" -q egg_info
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"

fairflare describe term t
fairflare run term --in-process --sites 3 --rounds 2 --overwrite \
  --set t=0.5 --set image_size=[32,32] --set features=[4,4,8,8,8,4] --set phantom_cases=0.3
fairflare export term --preinstalled --out jobs --overwrite

"""What an administrator of each participant does once: allow our classes, say where the images are."""

import json
import subprocess
import sys
from pathlib import Path

from fairflare.provision import job_classes

if __name__ == "__main__":
    kits, *names = sys.argv[1:]
    data = Path("data").absolute()
    if not data.exists():  # made-up images in place of the hospitals' own
        made = ["fairflare", "phantom", "prostate", "--sites", "3", "--size", "32", "--out", str(data)]
        subprocess.run(made, check=True)
    for name in names:
        local = Path(kits) / name / "local"
        file = local / "resources.json"
        resources = json.loads((file if file.exists() else local / "resources.json.default").read_text())
        listed = resources["class_allow_list"]
        listed += [path for path in job_classes() if path not in listed]
        file.write_text(json.dumps(resources, indent=2))
        own = {"num_threads": 1, "min_cases": 5, "data_root": str(data / name)}
        if (data / name).is_dir():
            (local / "fairflare.json").write_text(json.dumps(own, indent=2))

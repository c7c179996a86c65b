"""Run FLARE's own FedAvg recipe in its simulator: python benchmarks/beside/flare_job.py WORKSPACE WORKERS"""

import sys
from pathlib import Path

import beside_common as common
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.client.config import ExchangeFormat
from nvflare.recipe.sim_env import SimEnv

if __name__ == "__main__":
    workspace, workers = sys.argv[1:]
    sys.argv = sys.argv[:1]  # the recipe has a command line of its own
    recipe = FedAvgRecipe(
        name="fedavg",
        model={"class_path": "beside_common.Net", "args": {}},
        min_clients=common.SITES,
        num_rounds=common.ROUNDS,
        train_script=str(Path(__file__).with_name("flare_client.py")),
        server_expected_format=ExchangeFormat.PYTORCH,
        key_metric="dice",
    )
    run = recipe.execute(SimEnv(num_clients=common.SITES, num_threads=int(workers), workspace_root=workspace))
    print(run.get_status())

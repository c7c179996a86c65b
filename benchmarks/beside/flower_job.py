"""Run Flower's FedAvg in its simulation: python benchmarks/beside/flower_job.py WORKERS

Flower needs an environment of its own (its pins and FLARE's exclude each other): flwr[simulation], torch, monai.
"""

import sys

import beside_common as common
import torch
from flwr.client import ClientApp, NumPyClient
from flwr.common import Context, ndarrays_to_parameters
from flwr.server import ServerApp, ServerAppComponents, ServerConfig
from flwr.server.strategy import FedAvg
from flwr.simulation import run_simulation


class Client(NumPyClient):
    def __init__(self, site: int) -> None:
        self.site = site
        self.data = {split: common.images(site, split) for split in common.IMAGES}
        self.model = common.build()

    def load(self, parameters):
        names = self.model.state_dict()
        self.model.load_state_dict({n: torch.as_tensor(v) for n, v in zip(names, parameters, strict=True)})

    def fit(self, parameters, config):
        self.load(parameters)
        score = common.evaluate(self.model, *self.data["validation"])
        common.train(self.model, *self.data["training"], seed=self.site)
        return [v.numpy() for v in self.model.state_dict().values()], common.IMAGES["training"], {"dice": score}

    def evaluate(self, parameters, config):
        self.load(parameters)
        return 0.0, common.IMAGES["test"], {"dice": common.evaluate(self.model, *self.data["test"])}


def client(context: Context):
    torch.set_num_threads(1)
    return Client(int(context.node_config["partition-id"])).to_client()


class TestedOnce(FedAvg):
    """Test images are looked at after the last round, as by the others."""

    def configure_evaluate(self, server_round, parameters, client_manager):
        if server_round < common.ROUNDS:
            return []
        return super().configure_evaluate(server_round, parameters, client_manager)


def mean_dice(results):
    return {"dice": sum(metrics["dice"] for _, metrics in results) / len(results)}


def server(context: Context) -> ServerAppComponents:
    first = ndarrays_to_parameters([v.numpy() for v in common.build().state_dict().values()])
    strategy = TestedOnce(
        initial_parameters=first,
        fraction_fit=1.0,
        min_fit_clients=common.SITES,
        min_available_clients=common.SITES,
        min_evaluate_clients=common.SITES,
        fit_metrics_aggregation_fn=mean_dice,
        evaluate_metrics_aggregation_fn=mean_dice,
    )
    return ServerAppComponents(strategy=strategy, config=ServerConfig(num_rounds=common.ROUNDS))


if __name__ == "__main__":
    run_simulation(
        server_app=ServerApp(server_fn=server),
        client_app=ClientApp(client_fn=client),
        num_supernodes=common.SITES,
        backend_config={
            "client_resources": {"num_cpus": 1, "num_gpus": 0},
            "init_args": {"num_cpus": int(sys.argv[1])},
        },
    )

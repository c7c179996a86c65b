"""Draw random numbers that only the site can know, for the noise and for the choice of a batch's patients."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class SecretDraws:
    """Draw random numbers by ChaCha20 with a secret random key; each step has a new object with a new key.

    The run's seed is not used, since the server knows it: by having another model trained with the same noise,
    the server would learn the difference of two gradients without noise.

    Args:
        key: 32 bytes, for tests; ``None`` for random ones from the operating system.
    """

    def __init__(self, key: bytes | None = None) -> None:
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms

        secret = os.urandom(32) if key is None else key
        self._stream = Cipher(algorithms.ChaCha20(secret, bytes(16)), mode=None).encryptor()

    def uniform(self, count: int) -> Floats:
        """Return uniform random numbers in [0, 1) with 53 random bits each, (count,)."""
        words = np.frombuffer(self._stream.update(bytes(8 * count)), "<u8")
        return np.asarray((words >> np.uint64(11)).astype(np.float64) * 2.0**-53)

    def noise(self, count: int) -> Floats:
        """Return standard normal numbers, (count,), each half the sum of four.

        Source:
            Box and Muller; half the sum of four against the attack on floating-point numbers, as Opacus does: Holohan
            and Braghin, 2021, arXiv 2107.10138.
        """
        length = np.sqrt(-2 * np.log1p(-self.uniform(2 * count)))
        turn = 2 * np.pi * self.uniform(2 * count)
        four = np.concatenate([length * np.cos(turn), length * np.sin(turn)]).reshape(4, count)
        return np.asarray(four.sum(0) / 2)

    def draw(self, count: int, rate: float) -> list[int]:
        """Return the numbers below ``count``, each drawn independently with probability ``rate`` (Poisson sampling)."""
        return list(map(int, np.flatnonzero(self.uniform(count) < rate)))

    def some(self, population: Sequence[int], most: int) -> list[int]:
        """Return at most ``most`` of the numbers, chosen at random where there are more."""
        if len(population) <= most:
            return list(population)
        return [population[k] for k in np.argsort(self.uniform(len(population)), kind="stable")[:most].tolist()]

"""The executors that the contract is held against. An executor that is added here gets the whole suite."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from octavo.core.step import Executor
from octavo.testing.checking_executor import CheckingExecutor
from tests.executor.test_model_executor import VOCAB_SIZE, make


@dataclass(frozen=True)
class ExecutorCase:
    """A fresh executor and the sizes of its world. `num_blocks` is at least 16 for each group."""

    executor: Executor
    block_size: int
    num_blocks: int
    vocab_size: int
    num_groups: int = 1


EXECUTORS: dict[str, Callable[[], ExecutorCase]] = {
    "checking": lambda: ExecutorCase(CheckingExecutor(4, vocab_size=50), 4, 64, 50),
    "checking, two groups": lambda: ExecutorCase(
        CheckingExecutor(4, vocab_size=50, windows=(None, None)), 4, 64, 50, 2
    ),
    "model": lambda: ExecutorCase(make(32)[0], 16, 32, VOCAB_SIZE),  # a model that sums, on the reference operations
}

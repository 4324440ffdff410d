"""A conversation: what was said, and what each turn took from the cache. It does not know terminals or models."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.cli.session import Answer


@dataclass(frozen=True, slots=True)
class Turn:
    user: str
    answer: Answer


@dataclass(slots=True)
class Talk:
    """Owned by the chat command."""

    system: str = ""
    turns: list[Turn] = field(default_factory=list)

    def messages(self, user: str) -> list[dict[str, object]]:
        """The whole conversation with one more message, as a chat template takes it."""
        found: list[dict[str, object]] = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            found.append({"role": "user", "content": turn.user})
            found.append({"role": "assistant", "content": turn.answer.text})
        return [*found, {"role": "user", "content": user}]

    def start_over(self, system: str | None = None) -> None:
        """Forget the turns; with `system`, take that as the system prompt from now on."""
        self.turns.clear()
        if system is not None:
            self.system = system

    def stats(self) -> list[str]:
        """One line a turn: what its prompt had, what of it came from the cache, how quick it was."""
        if not self.turns:
            return ["no turns yet"]
        lines = []
        for number, turn in enumerate(self.turns, 1):
            answer = turn.answer
            share = answer.num_cached_tokens / answer.num_prompt_tokens if answer.num_prompt_tokens else 0.0
            speed = "" if answer.tokens_per_s is None else f", {answer.tokens_per_s:.1f} tokens/s"
            lines.append(
                f"turn {number}: {answer.num_prompt_tokens} prompt tokens, {answer.num_cached_tokens} of them cached "
                f"({share:.0%}), {answer.num_output_tokens} new; first token after {answer.first_token_s:.3f} s{speed}"
            )
        return lines

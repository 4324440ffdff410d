"""A conversation and its branches: what was said, what each turn took from the cache. It knows no terminal or model.

Branches share the turns that they have in common; the KV cache then has these turns already.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from octavo.cli.session import Answer

MAIN = "main"
SHOWN_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class Turn:
    user: str
    answer: Answer


@dataclass(slots=True)
class Talk:
    """Owned by the chat command. `turns` are those of the branch `name`; `others` the turns of the other branches."""

    system: str = ""
    turns: list[Turn] = field(default_factory=list)
    name: str = MAIN
    others: dict[str, list[Turn]] = field(default_factory=dict)  # Invariant: without `name`

    def messages(self, user: str) -> list[dict[str, object]]:
        """The whole conversation with one more message, as a chat template takes it."""
        found: list[dict[str, object]] = [{"role": "system", "content": self.system}] if self.system else []
        for turn in self.turns:
            found.append({"role": "user", "content": turn.user})
            found.append({"role": "assistant", "content": turn.answer.text})
        return [*found, {"role": "user", "content": user}]

    def start_over(self, system: str | None = None) -> None:
        """Forget all turns and branches; with `system`, take that as the system prompt from now on."""
        self.turns.clear()
        self.others.clear()
        self.name = MAIN
        if system is not None:
            self.system = system

    def back(self, count: str) -> str:
        """Take so many turns back. Gives what to tell the user."""
        if not count.isdecimal() or not 1 <= int(count) <= len(self.turns):
            return f"/back {count}: there are {len(self.turns)} turns to take back; /back takes one, /back N takes N"
        first = self.turns[-int(count)]
        del self.turns[-int(count) :]
        return f"back before: {_start(first.user)} ({_counted(len(self.turns), 'turn')} left)"

    def branch(self, turn: str, name: str | None = None) -> str:
        """Go on behind a turn of this branch in a new one. Gives what to tell the user."""
        if not turn.isdecimal() or int(turn) > len(self.turns):
            return f"/branch {turn}: give the number of a turn, from 0 (the beginning) to {len(self.turns)}"
        if name is None:
            name = next(free for number in range(2, len(self.others) + 3) if (free := f"b{number}") not in self._names)
        if not name.isprintable() or " " in name:
            return f"{name!r} cannot be the name of a branch; give it one word"
        if name in self._names:
            return f"there is a branch {name} already; /switch {name} goes there"
        self.others[self.name] = self.turns
        self.name, self.turns = name, self.turns[: int(turn)]
        return f"in the new branch {name}, behind turn {turn}; /switch goes to another one"

    def switch(self, name: str) -> str:
        """Go on in another branch. Gives what to tell the user."""
        if name == self.name:
            return f"this is the branch {name}"
        if name not in self.others:
            return f"there is no branch {name!r}; there are {', '.join(self._names)}"
        self.others[self.name] = self.turns
        self.name, self.turns = name, self.others.pop(name)
        return f"in the branch {name}, behind turn {len(self.turns)}"

    def outline(self) -> list[str]:
        """The turns of this branch, numbered, and the other branches with how much they have in common with it."""
        lines = [f"branch {self.name}, {_counted(len(self.turns), 'turn')}:"]
        lines += [f"  {number}  {_start(turn.user)}" for number, turn in enumerate(self.turns, 1)]
        for name in sorted(self.others):
            turns = self.others[name]
            common = 0
            while common < min(len(turns), len(self.turns)) and turns[common] is self.turns[common]:
                common += 1
            lines.append(f"branch {name}, {_counted(len(turns), 'turn')}, the first {common} of them the same")
        return [*lines, "/branch N [NAME] goes on behind turn N, /switch NAME goes to another branch"]

    def stats(self) -> list[str]:
        """One line a turn of this branch: what its prompt had, what of it came from the cache, how quick it was."""
        lines = [f"branch {self.name}:"] if self.others else []
        if not self.turns:
            return [*lines, "no turns yet"]
        for number, turn in enumerate(self.turns, 1):
            answer = turn.answer
            share = answer.num_cached_tokens / answer.num_prompt_tokens if answer.num_prompt_tokens else 0.0
            speed = "" if answer.tokens_per_s is None else f", {answer.tokens_per_s:.1f} tokens/s"
            lines.append(
                f"turn {number}: {answer.num_prompt_tokens} prompt tokens, {answer.num_cached_tokens} of them cached "
                f"({share:.0%}), {answer.num_output_tokens} new; first token after {answer.first_token_s:.3f} s{speed}"
            )
        return lines

    @property
    def _names(self) -> list[str]:
        return sorted([self.name, *self.others])


def _start(text: str) -> str:
    line = " ".join(text.split())
    return f"{line[:SHOWN_CHARACTERS]}{'...' if len(line) > SHOWN_CHARACTERS else ''}"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"

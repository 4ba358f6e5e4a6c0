"""Warm start: good episodes that are on record become supervised training of the agent's adapter.

Through the same Tinker API as the outer loop and on tinker-cookbook's supervised loop. What was
played by a script or by a stronger agent is rendered for the agent that learns; its own messages
are what it is trained on. Knows nothing about how episodes are played.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from metatrainer.agent import tools
from metatrainer.config import RunSettings
from metatrainer.errors import BudgetError, ConfigError
from metatrainer.ledger import Ledger
from metatrainer.outer.service import Model, describe, opened
from metatrainer.outer.start import bring

if TYPE_CHECKING:
    import tinker

Message = dict[str, Any]


@dataclass(frozen=True)
class Recipe:
    """How the adapter is trained."""

    epochs: int
    batch_size: int
    """Sequences of one update: an episode is one, or one for each of the agent's messages where the
    renderer writes earlier ones otherwise, as those of thinking models do."""
    learning_rate: float
    """Adam's at the first update; it falls to 0 in a line."""


@dataclass(frozen=True)
class Selection:
    """Episodes to learn from."""

    conversations: list[list[Message]]
    left_out: dict[str, int]
    """Why others are not among them -> how many."""


@dataclass(frozen=True)
class Learned:
    """What came of it."""

    episodes: int
    left_out: dict[str, int]
    updates: int
    tokens: int
    """Of one epoch."""
    nll_first: float
    """Mean negative log-likelihood of a trained token, in the first update."""
    nll_last: float

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def select(ledgers: Sequence[Path], settings: RunSettings, min_reward: float) -> Selection:
    """The episodes of some ledgers that are worth learning from.

    Those are over and earned min_reward, are of a family that the settings do not hold out and were
    not played to measure, and have no message that could not be read as calls. Raises ConfigError
    if there is none.
    """
    kept: list[list[Message]] = []
    left_out: Counter[str] = Counter()
    for path in ledgers:
        with Ledger(path, readonly=True) as ledger:
            family_of = {task.id: task.family for task in ledger.tasks()}
            for row in ledger.episodes():
                if not row.done or row.total is None:
                    left_out["not over"] += 1
                elif row.phase.startswith("heldout") or family_of[row.task] in settings.heldout:
                    left_out["held out"] += 1
                elif row.total < min_reward:
                    left_out["below the reward"] += 1
                else:
                    messages = [json.loads(m.content) for m in ledger.messages(row.id)]
                    if all(_readable(m) for m in messages):
                        kept.append(messages)
                    else:
                        left_out["with an unread message"] += 1
    if not kept:
        why = ", ".join(f"{n} {reason}" for reason, n in left_out.items())
        raise ConfigError(
            f"no episode is left to learn from ({why or 'none was recorded'}); record better ones "
            "with `metatrainer eval --agent reference --keep DIR`, or ask for less reward"
        )
    return Selection(kept, dict(left_out))


async def train(
    settings: RunSettings,
    folder: Path,
    selection: Selection,
    recipe: Recipe,
    on_update: Callable[[int, int], None],
) -> Learned:
    """Train the adapter on the episodes and leave it in the folder, from which a run can start.

    folder: has the settings; gets checkpoints/ and logs/. on_update: told updates begun and all.
    Raises ConfigError if nothing fits into the model, BudgetError if it would cost too much.
    """
    from tinker_cookbook.supervised import train as cookbook

    from metatrainer.tinker.seam import log_to, serve

    logs = folder / "logs"
    logs.mkdir()
    with log_to(logs / "train.log"), opened(settings, folder) as service:
        model = await describe(service, settings.agent)
        data, too_long = render(selection.conversations, model)
        if not data:
            raise ConfigError(
                f"none of {too_long} episodes fits into the {model.context} tokens of the model"
            )
        tokens = sum(datum.model_input.length for datum in data)
        _afford(settings, tokens * recipe.epochs)
        batches = Batches(data, recipe.batch_size, settings.seed, recipe.epochs, on_update)
        config = cookbook.Config(
            log_path=str(logs),
            model_name=settings.agent.model,
            recipe_name="metatrainer-warmstart",
            renderer_name=settings.agent.renderer,
            dataset_builder=batches,
            learning_rate=recipe.learning_rate,
            num_epochs=recipe.epochs,
            lora_rank=settings.agent.lora_rank,
            load_checkpoint_path=bring(settings, folder),
            save_every=0,
            eval_every=0,
        )
        with serve(service):
            await cookbook.main(config)
    lines = (logs / "metrics.jsonl").read_text().splitlines()
    nll = [
        found["train_mean_nll"] for line in lines if "train_mean_nll" in (found := json.loads(line))
    ]
    left_out = {**selection.left_out, **({"too long": too_long} if too_long else {})}
    kept = len(selection.conversations) - too_long
    return Learned(kept, left_out, len(nll), tokens, nll[0], nll[-1])


def render(
    conversations: Sequence[Sequence[Message]], model: Model
) -> tuple[list[tinker.Datum], int]:
    """Conversations as training data, and how many do not fit into the model's context.

    Every message of the agent is trained, and each sequence weighs as much as any other.
    """
    from tinker_cookbook.renderers.base import TrainOnWhat
    from tinker_cookbook.supervised.common import datum_from_model_input_weights

    data: list[tinker.Datum] = []
    too_long = 0
    for messages in conversations:
        prefix = model.renderer.create_conversation_prefix_with_tools(tools.schemas())
        examples = model.renderer.build_supervised_examples(
            [*prefix, *map(_cookbook, messages)], TrainOnWhat.ALL_ASSISTANT_MESSAGES
        )
        if model.context and max(tokens.length for tokens, _ in examples) > model.context:
            too_long += 1
            continue
        data += [datum_from_model_input_weights(*each, reduction="mean") for each in examples]
    return data, too_long


class Batches:
    """The data in batches, drawn anew for each epoch from one seed; its own builder."""

    def __init__(
        self,
        data: Sequence[tinker.Datum],
        size: int,
        seed: int,
        epochs: int,
        on_update: Callable[[int, int], None],
    ):
        self._data, self._size, self._seed = list(data), size, seed
        self._order = list(range(len(data)))
        self._begun, self._all = 0, epochs * len(self)
        self._on_update = on_update

    def __len__(self) -> int:
        return -(-len(self._data) // self._size)

    def set_epoch(self, seed: int = 0) -> None:
        """Shuffle for an epoch."""
        self._order = list(range(len(self._data)))
        random.Random(f"{self._seed}/{seed}").shuffle(self._order)

    def get_batch(self, index: int) -> list[tinker.Datum]:
        """The data of one update."""
        self._begun += 1
        self._on_update(self._begun, self._all)
        chosen = self._order[index * self._size : (index + 1) * self._size]
        return [self._data[i] for i in chosen]

    def __call__(self) -> tuple[Batches, None]:
        return self, None

    def __deepcopy__(self, memo: dict) -> Batches:
        """Itself: tinker-cookbook copies its configuration, of which this is a part, to log it."""
        return self

    def to_dict(self) -> dict[str, Any]:
        """What tinker-cookbook's log keeps of it."""
        return {"examples": len(self._data), "batch_size": self._size, "seed": self._seed}


def _readable(message: Message) -> bool:
    """Whether a message is none of the agent's, or one that holds calls and nothing else."""
    if message["role"] != "assistant":
        return True
    return bool(message["tool_calls"]) and not message["errors"]


def _cookbook(message: Message) -> Any:
    """A recorded message as renderers take it."""
    from tinker_cookbook.renderers.base import Message as CookbookMessage
    from tinker_cookbook.renderers.base import ToolCall

    made = CookbookMessage(role=message["role"], content=message["content"])
    if message["role"] == "tool":
        made["tool_call_id"], made["name"] = message["tool_call_id"], message["name"]
    if calls := message.get("tool_calls"):
        made["tool_calls"] = [
            ToolCall(
                function=ToolCall.FunctionBody(
                    name=call["name"], arguments=json.dumps(call["arguments"])
                ),
                id=call["id"],
            )
            for call in calls
        ]
    return made


def _afford(settings: RunSettings, tokens: int) -> None:
    money = settings.money
    usd = tokens * (money.usd_per_million_trained_tokens or 0.0) / 1e6
    if money.max_usd is not None and usd > money.max_usd:
        raise BudgetError(
            f"{tokens} tokens to train on cost {usd:.2f}, over money.max_usd {money.max_usd:.2f}; "
            "take fewer epochs or episodes, or raise it"
        )

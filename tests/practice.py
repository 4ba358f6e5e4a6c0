"""A job's tasks, rewards and settings, without a sandbox around them."""

from types import SimpleNamespace

from metatrainer.jobs.spec import TrainingSpec


class Practice:
    """The tasks and rewards of a job."""

    def __init__(self, family, n=64, reward=None):
        self.items = family.items("train", 1, n)
        self._reward = reward or (lambda item, reply: float(family.correct(reply, item.answer)))

    def load(self):
        return [
            SimpleNamespace(prompt=i.prompt, system_prompt=None, data={"world": i.world})
            for i in self.items
        ]

    def score(self, batch):
        scored = []
        for task, messages in batch:
            reply = messages[-1]["content"] if messages[-1]["role"] == "assistant" else ""
            reward = self._reward(self.items[task], reply)
            error = None if reward is not None else "it raised"
            scored.append(SimpleNamespace(reward=reward, error=error))
        return scored


def settings(**changes):
    good = {"model": "nano-wren", "learning_rate": 3e-3, "max_steps": 8, "batch_size": 64}
    return TrainingSpec(**(good | changes))

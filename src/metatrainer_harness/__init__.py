"""The harness of metatrainer under a name that verifiers can import: a dot is none to it."""

from metatrainer.jobs.harness import FamilyHarness

__all__ = ["FamilyHarness"]

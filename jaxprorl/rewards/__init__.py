"""Rewards: what they are named by, what they return, and the processes that call them."""

from jaxprorl.rewards.graded import Graded

__all__ = ["Graded"]

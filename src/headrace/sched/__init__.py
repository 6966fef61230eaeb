"""The scheduler: requests in, plans out. Pure and deterministic; it sees nothing but numbers that it is handed."""

from headrace.sched.blocks import BlockPool
from headrace.sched.order import FCFS, Order, Priority, Static
from headrace.sched.scheduler import Scheduler

__all__ = ["FCFS", "BlockPool", "Order", "Priority", "Scheduler", "Static"]

"""A compact LLM engine with a weight cache daemon: the executable specification that the suite is checked against."""

__version__ = "0.1.0"

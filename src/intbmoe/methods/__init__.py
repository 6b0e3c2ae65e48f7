"""One method, one file: the paper, the equations, a Config, the module."""

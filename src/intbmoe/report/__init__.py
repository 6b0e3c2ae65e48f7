"""What reports are made of, whoever writes them (``compare``, ``cost``, ``analyse``, the study): numbers, one table and
its renderers, one page, one style for all pictures, and where numbers come from."""

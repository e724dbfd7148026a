"""One folder per op: contract (`__init__.py`), reference, input cases, later its GPU kernel.

Reading order: `exact.py` (the arithmetic), `dispatch.py` (what runs where), then any op. Each op's
folder exports one function; its docstring is the contract. Shape suffixes: suzuri/model/batch.py.
"""

"""The operators, by family.  Importing this package registers all of them.

Adding an operator is adding a class to one of these files (or a new file here: every module of this folder is
imported).
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")

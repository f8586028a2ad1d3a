"""The operators, by family.  Importing this package registers all of them.

To add an operator, add a class to one of the files, or a new file: every module in these folders is imported.
"""

from ..support.plug_ins import import_all

import_all(__name__)

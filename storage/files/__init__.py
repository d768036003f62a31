"""Files and folders, local and on object stores: written whole or not at all."""

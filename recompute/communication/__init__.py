"""Programs of many ranks: the mesh, their verification, and an interpreter that runs all of them in one process."""

"""Communication between ranks: begun by one operator, awaited by another."""

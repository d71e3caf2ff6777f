"""How one vector goes through a reducer: agree, compensate, reduce, retain, record."""

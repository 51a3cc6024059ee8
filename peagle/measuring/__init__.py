"""What a drafter brings: acceptance, speed, the best number of drafts, cost, and the report of it all.

Sees the engine, the data and the training; is seen by the command line alone.
"""

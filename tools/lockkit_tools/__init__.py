"""Tools around lockkit, which imports none of them: benchmark, lab, simulation, throw-away servers."""

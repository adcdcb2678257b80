"""Hydra's config group `remat`: the callback and each planner, for this project's recipes and for your own app.

Only YAML lies here; nothing in the package imports Hydra. In the primary config of an app:

    defaults:
      - remat: auto
    hydra:
      searchpath: [pkg://lightning_remat.conf]

and then `hydra.utils.instantiate(config.remat)` is the callback, `remat=rotor remat.memory_budget=2GiB` a command line.
"""

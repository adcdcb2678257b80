"""What the search of `auto` was tuned with, in one place: over the networks of the papers and 20 budgets of each.

Efforts are counted in replayed actions. What compiled functions read stands beside them, since numba does not see that
a constant of another file has changed.
"""

# How much is searched.
ACTIONS_PER_EFFORT = 70_000_000  # of a search with effort 1: some five seconds
ACTIONS_PER_CALL = 1500  # what the Python around a compiled call costs, in replayed actions
SHARE_AFTER_A_RELATIVE = 0.3  # of the search is left to do from the states of a graph with the same operations
MAX_FRONTS = 8  # kept for later budgets
ROUNDING = 1e-9  # sums of the same seconds in another order differ by less, relatively

# Large graphs.
DEEP_NODES = 700  # beyond, the lowest peaks are out of reach of the local search, and planners for long chains help
DEEP_SHARE = 0.4  # of the search then: what those planners answer need not be found
DEEPER_NODES = 1500  # beyond, the share grows with the square of the nodes, and the lowest levels are bridged
BRIDGE_STEPS = 16  # in which the lowest two levels are searched then
BRIDGE_SHARE = 0.6  # of the effort, for those steps
NODES_PER_MOVE = 150  # a graph of so many nodes takes one more move a time

# The lowest peak.
NUM_FIRST_LEVELS = 20  # on the way down from plain autograd; half as many where a rival has reached the bound
WALKED_SHARE = 0.3  # of the effort, for walking down from plain autograd; past it the dynamic programs lead on
LED_SHARE = 0.5  # of the effort, for both
NUM_HALVINGS = 7  # of what lies between the bound and the lowest peak known, to find a lower one
PRESS_PART = 6  # one part in so many of the effort goes into kicks of the lowest states
MAX_IDLE_KICKS = 40  # of these in a row that found nothing

# Budget by budget.
NUM_LEVELS = 57  # between floor and plain peak; a multiple of 19, for tables of 20 budgets
LATER_SWEEPS_SHARE = 0.85  # of the effort, at which the second and third sweep over them end: the rest polishes
OVERTIME = 1.1  # of the effort, at which the sweep up again ends
POLISH_PART = 8  # one part in so many of the effort goes at least into polishing, whatever is spent by then
KICKS_AT_LOWEST = 3  # for each kick at any other level: nobody else looks for states there
MAX_IDLE_ROUNDS = 6  # of polishing in a row that found nothing

# One walk down, and back up.
WALK_SHARE = 0.05  # of the effort, for one walk down to a limit or one filling up of what it leaves free
PROBES, MANY_PROBES = 4, 12  # drops tried at each step; many, where a lower peak than any known is looked for
PROBE_STEPS = 16  # drops that a probe is followed by, until one lowers the excess
MOST_EXCHANGES = 8  # proposals replayed before an exchange is given up
KICK_PARTS = (4, 8, 16, 32)  # one part in so many of the absences is in reach of a kick, drawn anew each time
KICK_SHARES = (0.3, 0.6, 1.0)  # of those in reach are lifted

# States from the dynamic and the linear programs, from which walks start.
SEED_COLUMNS = 3000  # of the linear programs: larger ones take seconds and lead no further
SEED_SHARE = 0.5  # of the effort for a way down, level by level; past it each is searched from its neighbour only
FEW_SEEDS, MANY_SEEDS = 2, 4  # many, where a lower peak than any known is looked for
PROGRAM_BLOCKS = (16, 40, 100)  # of nodes, of the dynamic programs: coarse ones see far, fine ones see all
ROOM_SHARES = (1.08, 1.0, 0.93, 0.85)  # of the room at a limit that is asked for: what they count is not quite the peak
ROUNDED_FROM = (0.2, 0.5, 0.8)  # how much of a value the linear program must hold for the seed to hold it
MOST_ABOVE = 0.2  # of the room: a seed further above the limit is not walked down from
MOST_OVERHEAD = 2.5  # of the best known, likewise
PRICE_OF_ABOVE = 5  # what a seed's way down to the limit is taken to cost: overhead times so much of the room

# What is chosen from by all prices.
ROOMS_ABOVE = (0, 2, 8)  # peaks above its own up to which a state is given room

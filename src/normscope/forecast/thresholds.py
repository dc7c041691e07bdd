"""Thresholds of the forecast's rule; docs/forecast-rule.md names the runs that set and tested them."""

EXTENSION = 5  # further steps of an undecided trial, once
WORSE = 1.5  # loss over the first loss from which the run diverges
BLOWN_UP = 10.0  # the same for batches that are not tokens: random labels alone make a loss rise
FEW = 10  # steps below which no run is called trained: the rule was set on measurements after 20 and 40
LONG = 100  # steps after which a loss at the unigram entropy that has stopped falling is stuck
LEARNT = 0.1  # nats under the unigram entropy: the model uses its context
TIME_CONSTANT = 80.0  # steps in which the loss's excess over the unigram entropy must fall by a factor of e
AGREEMENT = 0.3  # pace that a pull of 1 makes up for: agreement on separating tokens speeds the run up
ARRIVED = 1 / 3  # share of that excess below which pace is not informative
NEAR = 0.28  # nats over the unigram entropy from which a run still gets under it
LEAD = 5.0  # pace gained per nat that a run at a larger learning rate is below `NEAR`
MOST_LEAD = 0.5  # largest such gain: a smaller loss only shows that the frequencies are learnt
BEGUN = 0.5  # nats of that excess at the start below which pace cannot be measured
DEAD = 1e-10  # token diversity from which no run recovered; float32 resolves about 1e-14
SUNK = 2e-6  # diversity below which one run of ours in 40 recovered (from 7e-7)
TRANSIENT = 20  # steps in which diversity may fall by decades; a later fall continues
PARTED = 1e-3  # diversity above which tokens differ enough
FAINT = 1e-5  # diversity below which a run that does not separate its tokens has collapsed
ALIGNED = 3.0  # weight of alignment beside coherence: one is small where the other is not
ENOUGH = 0.03  # pull, coherence + 3·alignment, that separates tokens further: noise has less
SHARED = 0.12  # pull of a run on measured values that uses its input; noise has under 0.08
HELD = 0.02  # units by which such a run's loss may rise, or stay above that of a constant output
STEADY = 0.5  # share of the fall in the first half that a slow run has in the second; a stuck one has less
LEAST_FALL = 1e-3  # units by which a steady fall lowers the fixed batch's loss in a trial
DOUBT = 0.03  # distance from `ENOUGH` within which the trial continues
WORST = -3.0  # the lowest score

"""Rewards: the verdict of hidden tests, and priced terms over what a session did, left and spent."""

from etude.environment.rewards.length import Effort as Effort
from etude.environment.rewards.length import concave_price as concave_price
from etude.environment.rewards.length import measure_effort as measure_effort
from etude.environment.rewards.terms import Evidence as Evidence
from etude.environment.rewards.terms import check_reward as check_reward
from etude.environment.rewards.terms import compute_reward as compute_reward
from etude.environment.rewards.terms import with_length as with_length

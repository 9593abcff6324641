"""Glossary of the log: the meaning of every number, in a sentence or two, and its unit."""

GLOSSARY = {
    "rollout/success": "Share of the step's trajectories that solved their task, without lost"
    " trajectories.",
    "rollout/random": "Success of a uniformly random player on the evaluation prompts.",
    "rollout/optimum": "Success of the best possible player under the same budget; of an agent,"
    " of its example, whose own crashes count as lost.",
    "rollout/reward": "Mean total reward of a trajectory, as the environment gave it.",
    "rollout/in_group_std": "Standard deviation of total rewards within a group, mean over groups"
    " (StarPO Eq. 7; RAGEN-2's reward variance). The paper takes a cliff for the first sign of the"
    " Echo Trap.",
    "rollout/entropy": "Entropy of everything that was sampled, kept or not, estimated by the mean"
    " of -log p: nats a token, mean over prompts.",
    "rollout/entropy_variance": "Variance over prompts of that entropy. Near 0, the policy is as"
    " sure or unsure whatever it is asked.",
    "rollout/distinct_openings": "Share of distinct ones among the first 16 tokens of the first"
    " answers, one of each prompt. It falls when answers no longer look at their prompt.",
    "rollout/ngram_overlap": "Probability that four tokens in a row of one prompt's first answer"
    " are in another prompt's too. A template drives it to 1.",
    "rollout/response_length": "Sampled tokens a turn.",
    "rollout/thought_length": "Words of the thought a turn; 0 for a turn without one.",
    "rollout/true_claims": "Share of the claims in thoughts that are true of the state, where the"
    " environment can check them. Falling while success rises: the policy has learned to say what"
    " pays, not what is.",
    "rollout/valid_format_rate": "Share of turns that could be parsed.",
    "rollout/valid_action_rate": "Share of turns whose actions were all legal.",
    "rollout/num_turns": "Turns a trajectory.",
    "rollout/ignored_sampling": "Answers of agents whose request asked for another temperature or"
    " top_p than the trainer's, which held.",
    "rollout/untrained_answers": "Answers of agents outside the loss mask: of roles that are not"
    " trained, or drawn by the agent's own sampling.",
    "rollout/undelivered_answers": "Answers of agents that no connection was left for; they have no"
    " part in the episode.",
    "rollout/quoted_markers": "Control markers and tags in what environments said, which the policy"
    " saw as plain letters.",
    "rollout/cut_answer_rate": "Share of turns whose answer reached the limit of its length.",
    "rollout/truncated_rate": "Share of trajectories that were cut before their task ended, by"
    " whatever cause: the sum of rollout/truncated_by_*.",
    "rollout/truncated_by_budget": "Share of trajectories that used up their turns or actions.",
    "rollout/truncated_by_environment": "Share of trajectories that the environment itself cut.",
    "rollout/truncated_by_context": "Share of trajectories that filled the context.",
    "rollout/truncated_by_time": "Share of trajectories that a call of the environment beyond its"
    " time limit ended.",
    "rollout/truncated_by_error": "Share of trajectories that an error of the environment ended.",
    "rollout/num_trajectories": "Trajectories of the step.",
    "rollout/sampled_tokens": "Sampled tokens of the step's trajectories under the loss mask. The"
    " progress bar counts untrained and undelivered answers of agents too, and episodes that"
    " another attempt replaced.",
    "rollout/level": "Hardest difficulty of an environment from which tasks are drawn"
    " (--curriculum-success).",
    "rollout/sampling_rounds": "Rollouts that the step took until enough groups had spread.",
    "rollout/staleness": "Steps by which the weights had moved on since they sampled (placement"
    " separate), mean over sampled tokens.",
    "rollout/continued": "Share of trajectories that went on under later weights (--carry-over).",
    "rollout/environment_errors": "Episodes that an error or the time limit of their environment"
    " ended, those that another attempt replaced included.",
    "rollout/resampled": "Episodes among them that another attempt replaced.",
    "rollout/lost_trajectories": "Trajectories without a return, since their last attempt failed"
    " too: they are in no mean, in no ranking and in no loss.",
    "rollout/tokens_per_second": "rollout/sampled_tokens a second of rollout and weight sync.",
    "reward/*": "Mean over trajectories of what this reward term contributed, its weight included.",
    "reward/success_ranking": "How often a solved trajectory earned more than an unsolved one, ties"
    " half: 1 teaches success, 0.5 does not see it, less pays for failing.",
    "reward/inverted": "Environments whose failures earn more in the mean than their successes"
    " under the reward terms, but not by their own payouts.",
    "reward/inverted_by": "What this reward term pays the failures of these environments more than"
    " their successes.",
    "reward/missing_verdicts": "Trajectories that a judge gave no verdict on: they are in no"
    " ranking and in no loss.",
    "reward/in_group_std": "Standard deviation of shaped rewards within a group, mean over groups:"
    " what advantages are made of.",
    "reward/total": "Mean total of the shaped rewards, which advantages are made of.",
    "teacher/kl": "Log-probability of a sampled token under the policy less that under the teacher,"
    " in nats, mean over the sampled tokens: an estimate of KL(policy || teacher).",
    "teacher/top_k_mass": "Probability that the teacher gives the tokens of --teacher-top-k"
    " together, mean over the sampled tokens: what is left is not taught.",
    "filter/kept_groups": "Groups that the filter kept for training; of several environments each"
    " by its name.",
    "filter/short_groups": "Groups of which fewer than two trajectories have a return: they are"
    " not trained on.",
    "filter/kept_fraction": "Kept groups over all groups.",
    "filter/constant_groups": "Share of groups whose trajectories all earned the same: nothing can"
    " be learned from them.",
    "filter/kept_std": "Standard deviation of total rewards within a kept group.",
    "mismatch/logprob_mean_abs_diff": "Mean distance of the engine's and the trainer's"
    " log-probabilities of the sampled tokens, in nats, under the same weights; the engine's are of"
    " earlier ones with --max-staleness.",
    "mismatch/logprob_max_abs_diff": "The largest such distance.",
    "mismatch/kl_rollout_old": "KL divergence from the engine to the trainer (k3), nats a token.",
    "collapse/mutual_information": "How many nats the prompt tells about the thought (RAGEN-2)."
    " Near 0, thoughts no longer depend on their input.",
    "collapse/max_mutual_information": "The most that could be told: the entropy of the prompts.",
    "collapse/conditional_entropy": "Nats a thought varies by for one prompt.",
    "collapse/entropy": "Nats a thought varies by over all prompts.",
    "collapse/retrieval_accuracy": "How often the thought's own prompt explains it best.",
    "collapse/retrieval_chance": "What guessing the prompt would reach.",
    "collapse/score": "Mutual information in standard deviations of the thoughts' marginal"
    " log-probabilities (RAGEN-2's z-score).",
    "collapse/score_average": "Exponential moving average of that score, decay 0.9 an estimate.",
    "critic/loss": "Value loss, after clipping if there is any.",
    "critic/clip_fraction": "Share of tokens whose value moved towards its target beyond the clip"
    " range.",
    "critic/explained_variance": "1 - Var(return - value) / Var(return): 1 is perfect, 0 is as good"
    " as a constant.",
    "critic/grad_norm": "Norm of the critic's gradient before clipping.",
    "critic/skipped": "Share of updates that were skipped as not finite.",
    "critic/computed_share": "Share of the tokens that updates computed; the others were shared.",
    "critic/context_gbytes": "Gigabytes of the critic's exchange, see actor/context_gbytes.",
    "critic/routing_load": "Load of the critic's experts, see actor/routing_load.",
    "critic/routing_entropy": "Entropy of the critic's routers, see actor/routing_entropy.",
    "critic/lr": "Learning rate of the critic.",
    "actor/loss": "Clipped surrogate with its entropy and KL terms.",
    "actor/entropy": "Entropy of the policy, nats a token. A collapse or a jump is a sign of the"
    " Echo Trap.",
    "actor/approx_kl": "KL divergence from the policy of the old log-probabilities (--old-logprobs)"
    " to the updated one (k3), nats a token.",
    "actor/ref_kl": "KL divergence to the reference policy, nats a token.",
    "actor/clip_fraction_low": "Share of tokens whose ratio fell below 1 - clip_ratio_low where"
    " that binds.",
    "actor/clip_fraction_high": "Share of tokens whose ratio rose above 1 + clip_ratio_high where"
    " that binds.",
    "actor/dual_clip_fraction": "Share of tokens that the dual clip bounds.",
    "actor/importance": "Mean weight that corrects the engine's policy to the trainer's.",
    "actor/importance_masked": "Share of tokens that the importance left out of the policy loss.",
    "actor/forking_share": "Share of tokens with at least --min-entropy, which the policy loss is"
    " of.",
    "actor/teacher_kl": "KL(teacher || policy), nats a token, of the tokens that the teacher finds"
    " likeliest (--teacher-top-k).",
    "actor/grad_norm": "Norm of the actor's gradient before clipping. A spike after entropy has"
    " moved is a sign that the run is lost.",
    "actor/skipped": "Share of updates that were skipped as not finite.",
    "actor/computed_share": "Share of the tokens that updates computed; the others were shared.",
    "actor/context_gbytes": "Gigabytes of keys and values that context-parallel ranks sent each"
    " other in a forward pass of an update (--context-parallel-size).",
    "actor/routing_load": "Tokens of the expert that gets most over the mean of all experts of its"
    " layer, mean over layers: 1 is an even load, which a mixture computes fastest.",
    "actor/routing_entropy": "Entropy of a router's probabilities of all experts, nats a token,"
    " mean over layers. Near 0, routers have stopped to explore.",
    "actor/routing_overlap": "Share of the replayed experts that the routers would have chosen"
    " themselves (--routing-replay).",
    "actor/routing_drift": "Probability that a router gives to its own choices beyond what it gives"
    " to the replayed ones, mean over tokens and layers. Small beside an overlap below 1: near"
    " ties. Large: the weights have moved away from the routes.",
    "actor/routing_unshared": "Share of the tokens that updates computed although others begin with"
    " the same tokens, because their routes differ.",
    "actor/lr": "Learning rate of the actor.",
    "guard/rollbacks": "How often --guard react has gone back to a checkpoint so far.",
    "guard/filter_share": "Share of the groups that the filter keeps which the guard leaves.",
    "update/nonfinite": "Updates whose loss or gradient was not finite; they changed nothing.",
    "update/tokens_per_second": "Tokens a second that advantages and updates went through.",
    "update/computed_tokens_per_second": "Of them those that the actor's updates computed, where it"
    " has any.",
    "share/*": "Share of the seconds of all ranks in this part of the step (rollout, sync, update,"
    " other), without waits.",
    "share/waiting_samples": "Share of the ranks' seconds in which they waited for a rollout of"
    " ranks that only sample.",
    "share/waiting_weights": "Share of the ranks' seconds in which ranks that only sample waited"
    " for weights.",
    "share/waiting_ranks": "Share of the ranks' seconds in which they waited for other ranks, the"
    " slowest in the end; idleness.jsonl has each rank's seconds.",
    "time/*": "Seconds of this part of the step, without parts inside it.",
    "time/step": "Seconds of the whole step.",
    "time/sync_seconds": "Seconds in which weights moved to the engine.",
    "time/sync_gbytes_expert": "Gigabytes that moved between expert-parallel ranks in a sync.",
    "time/sync_gbytes_per_second": "Gigabytes that moved between ranks a second of the sync.",
    "time/sync_gbytes_shard": "Gigabytes that each rank handed to its own engine.",
    "time/sync_gbytes_tensor": "Gigabytes that moved between tensor-parallel ranks in a sync.",
    "time/sync_gbytes_pipeline": "Gigabytes that moved between pipeline stages in a sync.",
    "memory/*": "GiB of this kind at this moment of the step or of its evaluation.",
    "engine/cached_share": "Share of the prompts' tokens that the engine did not compute again.",
    "engine/imbalance": "Decoding steps of the busiest engine over their mean.",
    "engine/restarts": "Rollout servers that were lost and replaced, in an evaluation too.",
    "engine/reissued": "Requests that were asked again for that.",
    "engine/ready": "Rollouts that lay ready when the trainers asked for one (placement separate)."
    " Always 0: they wait for the samplers, and more --rollout-ranks would help.",
    "engine/sending_seconds": "Seconds that sending weights to ranks which only sample took, beside"
    " the training.",
    "engine/weights_gbytes": "Gigabytes of weights that came to ranks which only sample.",
    "engine/sampling_seconds": "Seconds that the ranks which only sample took for the rollout.",
    "engine/waiting_seconds": "Seconds that they had waited for its weights. Large: the trainers"
    " are slower, and fewer --rollout-ranks would do.",
    "eval/success": "Share of held-out prompts that were solved at this evaluation; of several"
    " trained environments the mean.",
    "eval/reward": "Mean total reward at this evaluation.",
    "eval/random": "Success of a uniformly random player on the same prompts.",
    "eval/optimum": "Success of the best possible player on the same prompts; of an agent, of its"
    " example, whose own crashes count as lost.",
    "eval/starts_met": "Held-out first prompts that training had met by this evaluation, where it"
    " is any: boards are held out, but without boards the seeds of both may draw equal states.",
    "eval/initial": "The same before the first step (eval/initial_success and so on).",
    "eval/initial_success": "Share of held-out prompts that were solved before the first step.",
    "eval/initial_reward": "Mean total reward before the first step.",
    "custom/*": "A metric of your own, or one of --metrics.",
}
"""Metric key -> its meaning; `stage/*` for the keys of a stage that have no entry. A key with an
environment behind it, as `eval/success_sokoban`, means the same: the longest entry that a key
begins with holds.
"""

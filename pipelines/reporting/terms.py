"""The terms of a report, one meaning each. docs/terms.md has the same words with their formulas (a test compares)."""

TERMS = {
    "Round": "One draft and one pass of the target that verifies it. The pass over the prompt, which yields the first "
    "token of the answer, is no round.",
    "Draft slot": "A place in the drafted block. Slot 1 follows the anchor, the last token of the text so far.",
    "Accepted length": "Tokens that a round adds to the answer: the drafts that were kept and the target's own token. "
    "A block of 7 yields at most 8. The figure is all committed tokens divided by all rounds.",
    "Raw accepted": "Drafts that the acceptance rule takes, before a stop token or the length limit cuts the round.",
    "Bonus token": "The token that the target adds itself: a replacement for the first rejected draft, or one more "
    "when every draft was kept.",
    "Stop cut": "A round that ended at a stop token inside its accepted drafts. It has no bonus token.",
    "Acceptance rate, conditional": "How often the draft of a slot is accepted when all slots before it were.",
    "Survival": "How often a slot is still accepted, its draft and all before it, among the rounds that tell.",
    "Acceptance rate, analytic": "The probability of acceptance worked out from both distributions instead of counted: "
    "the sum over tokens of the smaller of the two probabilities.",
    "Confidence threshold": "Drafts are verified up to the first whose calibrated confidence is below it.",
    "Verification rate": "The share of verified drafts that were accepted.",
    "Confidence": "The drafter's own estimate of a slot's conditional acceptance rate. Their product is the predicted "
    "survival.",
    "Calibration": "One temperature a slot, fitted on other prompts, that divides the confidence's logit.",
    "ECE": "Expected calibration error: predicted survival and counted survival compared in 20 bins of the prediction, "
    "their distances averaged by how full the bins are; mean over slots.",
    "Brier score": "Mean squared distance between predicted survival and what happened (1 accepted, 0 not).",
    "AUROC": "The probability that an accepted slot had a higher predicted survival than a rejected one.",
    "95% interval": "From a bootstrap that draws whole prompts again, with all their rounds, seeds and turns: those "
    "of one prompt are alike.",
    "Mean of domains": "Every domain counts the same, however many prompts it has.",
    "Load": "How many users have a request at the same time; one whose answer ends asks the next at once.",
    "Verification budget": "Drafts that a step verifies, a request each.",
    "Step cost": "The time of a step by the tokens in it, measured on the device named in the report, and of the draft "
    "by its requests.",
    "Tie": "A place where the target's two best logits are so close that rounding decides between them.",
}

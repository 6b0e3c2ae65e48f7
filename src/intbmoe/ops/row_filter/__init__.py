"""The feature filter on the way from tokens to rows: z = x ⊙ sigmoid(W_x x + W_c c_b), token and block term apart."""

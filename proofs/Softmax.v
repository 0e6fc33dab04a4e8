(** Softmax and cross entropy of pieces, put together.

    Claims: cross entropy over a vocabulary that is cut over ranks is the whole one's; attention
    worked out block by block (online softmax) is the whole one's, whatever the blocks, the order in
    which they are merged, and the numbers that are subtracted in the exponents.

    [exp] and [log] are any functions with the laws below; real exponential and logarithm are. *)
From mathcomp Require Import all_ssreflect all_algebra.
Set Implicit Arguments.
Unset Strict Implicit.
Unset Printing Implicit Defensive.
Import GRing.Theory Order.Theory Num.Theory.
Local Open Scope ring_scope.

Section Softmax.
Variables (R : realFieldType) (exp log : R -> R).
Hypothesis exp_add : forall a b, exp (a + b) = exp a * exp b.
Hypothesis exp_gt0 : forall a, 0 < exp a.
Hypothesis log_exp_mul : forall c s, 0 < s -> log (exp c * s) = c + log s.

Lemma exp_neq0 a : exp a != 0.
Proof. exact: lt0r_neq0. Qed.

Lemma exp0 : exp 0 = 1.
Proof. by apply: (mulfI (exp_neq0 0)); rewrite -exp_add addr0 mulr1. Qed.

Lemma exp_sub z c : exp (z - c) * exp c = exp z.
Proof. by rewrite -exp_add subrK. Qed.

Section Vocabulary.
Variables (n : nat) (word : finType) (own : word -> 'I_n.+1) (real : pred word) (z : word -> R).

Lemma owned_where (f : word -> R) :
  \sum_r \sum_(j | (r == own j) && real j) f j = \sum_(j | real j) f j.
Proof.
rewrite (exchange_big_dep real) /=; last by move=> r j _ /andP[].
apply: eq_bigr => j ok; rewrite (big_pred1 (own j)) // => r /=.
by rewrite ok andbT.
Qed.

(** What a rank adds up: padding takes no part, [c] is any number (mfun takes the global maximum). *)
Definition exponentials (c : R) (r : 'I_n.+1) : R :=
  \sum_(j | (r == own j) && real j) exp (z j - c).

Lemma exponentials_sum c :
  (\sum_r exponentials c r) * exp c = \sum_(j | real j) exp (z j).
Proof. by rewrite owned_where mulr_suml; apply: eq_bigr => j _; rewrite exp_sub. Qed.

Lemma sum_exp_gt0 (y : word) (f : word -> R) : real y -> 0 < \sum_(j | real j) exp (f j).
Proof.
move=> ok; rewrite (bigD1 y) //=; apply: ltr_paddr => //.
by apply: sumr_ge0 => j _; apply: ltW.
Qed.

(** Shift invariance, across ranks. *)
Theorem vocab_lse c y : real y ->
  c + log (\sum_r exponentials c r) = log (\sum_(j | real j) exp (z j)).
Proof.
move=> ok; rewrite -(exponentials_sum c) mulrC log_exp_mul //.
by rewrite owned_where; apply: (sum_exp_gt0 (fun j => z j - c) ok).
Qed.

(** Each rank's probabilities are those of the whole softmax. *)
Theorem vocab_softmax c j : 
  exp (z j - c) / (\sum_r exponentials c r) = exp (z j) / \sum_(k | real k) exp (z k).
Proof.
rewrite -(exponentials_sum c) -[in RHS](exp_sub (z j) c).
by rewrite invfM mulrACA divff ?exp_neq0 // mulr1.
Qed.

(** The loss of a token with label y, for any rule made of lse, the label's logit and the sum of
    logits: label smoothing and z-loss are such. *)
Theorem vocab_cross_entropy (rule : R -> R -> R -> R) c y : real y ->
  rule (c + log (\sum_r exponentials c r))
       (\sum_r if r == own y then z y else 0)
       (\sum_r \sum_(j | (r == own j) && real j) z j) =
  rule (log (\sum_(j | real j) exp (z j))) (z y) (\sum_(j | real j) z j).
Proof.
move=> ok; rewrite (vocab_lse c ok) owned_where.
by rewrite -big_mkcond (big_pred1 (own y)).
Qed.

End Vocabulary.

Section Blocks.
Variables (key : finType) (z x : key -> R).

(** What is kept of a block of keys: a number subtracted from the scores, the sum of the
    exponentials, the sum of the values weighted by them (one of its coordinates). *)
Record block := Block { top : R; mass : R; total : R }.

Definition describes (b : block) (A : {pred key}) : Prop :=
  mass b * exp (top b) = \sum_(j in A) exp (z j) /\
  total b * exp (top b) = \sum_(j in A) exp (z j) * x j.

Definition merge (m : R) (a b : block) : block :=
  Block m (mass a * exp (top a - m) + mass b * exp (top b - m))
          (total a * exp (top a - m) + total b * exp (top b - m)).

Lemma one_key j : describes (Block (z j) 1 (x j)) (pred1 j).
Proof. by rewrite /describes /= mul1r mulrC !big_pred1_eq. Qed.

(** A block whose keys are all masked. *)
Lemma no_key m : describes (Block m 0 0) pred0.
Proof. by rewrite /describes /= mul0r !big_pred0_eq. Qed.

Lemma merge_describes m a b (A B : {pred key}) : [disjoint A & B] ->
  describes a A -> describes b B -> describes (merge m a b) [predU A & B].
Proof.
move=> apart [a1 a2] [b1 b2]; split; rewrite bigU //=.
- by rewrite mulrDl -!mulrA !exp_sub a1 b1.
- by rewrite mulrDl -!mulrA !exp_sub a2 b2.
Qed.

(** Blocks merged in any order, with any numbers subtracted. *)
Inductive merged : block -> {pred key} -> Prop :=
  | One b A : describes b A -> merged b A
  | Two m a b (A B : {pred key}) : [disjoint A & B] -> merged a A -> merged b B ->
      merged (merge m a b) [predU A & B].

Theorem online_softmax b A : merged b A ->
  total b / mass b = (\sum_(j in A) exp (z j) * x j) / \sum_(j in A) exp (z j).
Proof.
have keep c C : merged c C -> describes c C.
  by elim=> // m a d D E apart _ da _ dd; apply: merge_describes.
move=> /keep [m1 m2]; rewrite -m1 -m2 invfM mulrACA divff ?exp_neq0 //.
by rewrite mulr1.
Qed.

(** The log of the sum of exponentials that is kept beside it. *)
Theorem online_lse b (A : {pred key}) : describes b A -> 0 < mass b ->
  top b + log (mass b) = log (\sum_(j in A) exp (z j)).
Proof. by move=> [m1 _] pos; rewrite -m1 mulrC log_exp_mul. Qed.

Theorem merge_associative m k l a b c :
  merge m (merge k a b) c = merge m a (merge l b c).
Proof.
have step p q v : v * exp (p - q) * exp (q - m) = v * exp (p - m).
  by rewrite -mulrA -exp_add addrA subrK.
by rewrite /merge /= !mulrDl !step !addrA.
Qed.

Theorem merge_commutative m a b : merge m a b = merge m b a.
Proof. by rewrite /merge addrC [total a * _ + _]addrC. Qed.

End Blocks.
End Softmax.

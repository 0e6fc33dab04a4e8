(** Gradient synchronisation: what `mfun.grads` adds up is the gradient of the one program.

    Claims: when ranks hold copies of a parameter, the gradient is the sum of theirs, and of nothing
    else; copies that computed the same are weighted by 1 / number; splitting a reduction (over
    axes, over shards and their copies, over microbatches) changes nothing; the norm counts each
    element once. *)
From mathcomp Require Import all_ssreflect all_algebra.
Set Implicit Arguments.
Unset Strict Implicit.
Unset Printing Implicit Defensive.
Import GRing.Theory.
Local Open Scope ring_scope.

Section Replicated.
Variables (R : comRingType) (rank elem : finType).

(** The loss as a function of every rank's own copy moves by [slope g d] when the copies move by d,
    to first order; the one program moves all copies alike. Its gradient is the sum. *)
Definition slope (g d : rank -> elem -> R) : R := \sum_r \sum_i g r i * d r i.

Theorem replicated_gradient (g : rank -> elem -> R) (d : elem -> R) :
  slope g (fun _ => d) = \sum_i (\sum_r g r i) * d i.
Proof. by rewrite /slope exchange_big; apply: eq_bigr => i _; rewrite mulr_suml. Qed.

(** There is no other gradient. *)
Theorem replicated_gradient_unique (g : rank -> elem -> R) (whole : elem -> R) :
  (forall d, slope g (fun _ => d) = \sum_i whole i * d i) ->
  forall i, whole i = \sum_r g r i.
Proof.
move=> same i; have := same (fun j => (j == i)%:R); rewrite replicated_gradient.
have at_i (f : elem -> R) : \sum_j f j * (j == i)%:R = f i.
  by rewrite (bigD1 i) //= eqxx mulr1 big1 ?addr0 // => j /negPf ->; rewrite mulr0.
by rewrite !at_i.
Qed.

(** The same for programs that are polynomials in one parameter: the derivative of the sum of the
    ranks' losses is the sum of their derivatives, as polynomials. *)
Theorem replicated_polynomial (loss : rank -> {poly R}) :
  (\sum_r loss r)^`() = \sum_r (loss r)^`().
Proof. exact: raddf_sum. Qed.

(** Microbatches and ranks in any order, and one division by the token count at the end. *)
Theorem accumulated (mb : finType) (g : rank -> mb -> elem -> R) (scale : R) i :
  \sum_r \sum_m g r m i * scale = (\sum_m \sum_r g r m i) * scale.
Proof.
rewrite exchange_big mulr_suml; apply: eq_bigr => m _.
by rewrite mulr_suml.
Qed.

End Replicated.

(** Over some axes the ranks' gradients are summands, over others copies of the same. *)
Section Table.
Variables (R : fieldType) (part copy elem : finType).

Theorem partial_and_equal (g : part * copy -> elem -> R) (whole : elem -> R) :
  #|copy|%:R != 0 :> R ->
  (forall c i, \sum_p g (p, c) i = whole i) ->
  forall i, \sum_r #|copy|%:R^-1 * g r i = whole i.
Proof.
move=> some each i.
have -> : \sum_r #|copy|%:R^-1 * g r i = \sum_p \sum_c #|copy|%:R^-1 * g (p, c) i.
  by rewrite pair_big; apply: eq_bigr; case.
rewrite exchange_big /=; under eq_bigr => c _ do rewrite -mulr_sumr each.
by rewrite sumr_const -mulrnAr -[whole i *+ _]mulr_natl mulrA mulVf // mul1r.
Qed.

(** The weights of several axes multiply. *)
Theorem weights_multiply (a b : finType) :
  #|[finType of a * b]|%:R^-1 = #|a|%:R^-1 * #|b|%:R^-1 :> R.
Proof. by rewrite card_prod natrM invfM. Qed.

End Table.

(** Shards: n + 1 of them, each held by [copies] ranks. *)
Section Shards.
Variables (R : ringType) (n : nat) (copies elem : finType) (own : elem -> 'I_n.+1).
Local Notation shard := 'I_n.+1.
Variable g : shard * copies -> elem -> R.

(** Reduce-scatter over the shards' holders, all-reduce of a shard over its copies, all-gather: one
    all-reduce over all. *)
Definition scattered (c : copies) (s : shard) (i : elem) : R := \sum_t g (t, c) i.
Definition copied (s : shard) (i : elem) : R := \sum_c scattered c s i.
Definition gathered (i : elem) : R := copied (own i) i.

Theorem sharded_reduction i : gathered i = \sum_r g r i.
Proof.
rewrite /gathered /copied /scattered exchange_big pair_big.
by apply: eq_bigr; case.
Qed.

(** Sum over owners of what they own: each element once. *)
Theorem owners_count_once (f : elem -> R) :
  \sum_s \sum_(i | s == own i) f i = \sum_i f i.
Proof.
rewrite (exchange_big_dep xpredT) //=.
by apply: eq_bigr => i _; exact: big_pred1_eq.
Qed.

End Shards.

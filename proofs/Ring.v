(** Ring all-reduce: a reduce-scatter and an all-gather around the ring.

    Claims: after N - 1 steps of adding and passing on, and N - 1 of passing on, every rank holds
    the sum; a rank sends 2 (N - 1) / N of the buffer. N = n + 1 ranks, as many chunks, any sizes.

    In step t of the reduce-scatter rank r sends chunk r - t to rank r + 1, which adds it; in step t
    of the all-gather it sends chunk r + 1 - t, which rank r + 1 takes as it is. *)
From mathcomp Require Import all_ssreflect all_algebra.
Set Implicit Arguments.
Unset Strict Implicit.
Unset Printing Implicit Defensive.
Import GRing.Theory.
Local Open Scope ring_scope.

Section Ring.
Variables (R : zmodType) (n : nat).
Local Notation rank := 'I_n.+1.
Definition buffers := rank -> rank -> R.
Implicit Types (x b : buffers) (r c : rank) (t : nat).

(** k places further round the ring. *)
Definition ahead (r : rank) (k : nat) : rank := r + inZp k.

Lemma ahead0 r : ahead r 0 = r.
Proof. by rewrite /ahead (_ : inZp 0 = 0) ?addr0 //; apply: val_inj; rewrite /= mod0n. Qed.

Lemma inZpS k : inZp k.+1 = inZp k + inZp 1 :> rank.
Proof. by apply: val_inj; rewrite /= modnDm addn1. Qed.

Lemma aheadS r k : ahead r k.+1 = ahead r k + inZp 1.
Proof. by rewrite /ahead inZpS addrA. Qed.

Lemma ahead_inj r k l : (k <= n)%N -> (l <= n)%N -> ahead r k = ahead r l -> k = l.
Proof.
move=> kn ln /addrI /(congr1 val) /=.
by rewrite !modn_small ?ltnS.
Qed.

(** Chunk that rank r sends in step t. *)
Definition sent t r : rank := r - inZp t.

Definition add_step t b : buffers := fun r c =>
  let before := r - inZp 1 in
  if c == sent t before then b r c + b before c else b r c.

Fixpoint reduce_scatter t x : buffers := if t is s.+1 then add_step s (reduce_scatter s x) else x.

(** The chunk that a rank receives in step t is the one that started t + 1 ranks earlier. *)
Lemma receives t r c : (c == sent t (r - inZp 1)) = (r == ahead c t.+1).
Proof.
rewrite /sent aheadS /ahead -addrA -opprD [inZp 1 + _]addrC.
by rewrite [c == _]eq_sym subr_eq -addrA.
Qed.

Lemma untouched t x c k : (t < k <= n)%N -> reduce_scatter t x (ahead c k) c = x (ahead c k) c.
Proof.
elim: t k => // t IH k /andP[tk kn] /=; rewrite /add_step receives.
case: eqP => [same|_]; last by apply: IH; rewrite (ltnW tk).
have equal := ahead_inj kn (leq_trans (ltnW tk) kn) same.
by move: tk; rewrite equal ltnn.
Qed.

Lemma partial_sum t x c : (t <= n)%N ->
  reduce_scatter t x (ahead c t) c = \sum_(k < t.+1) x (ahead c k) c.
Proof.
elim: t => [_|t IH tn]; first by rewrite big_ord_recl big_ord0 addr0.
rewrite /= /add_step receives eqxx big_ord_recr /= addrC; congr (_ + _).
- by rewrite -IH ?(ltnW tn) // {1}aheadS addrK.
- by apply: untouched; rewrite ltnSn.
Qed.

(** The reduce-scatter: rank c + n, the one before c, ends with the whole sum of chunk c. *)
Theorem ring_reduce_scatter x c : reduce_scatter n x (ahead c n) c = \sum_r x r c.
Proof.
rewrite partial_sum // [RHS](reindex_inj (addrI c)).
by apply: eq_bigr => k _; rewrite /ahead valZpK.
Qed.

(** The all-gather, started from what each rank ended with. *)
Definition take_step t b : buffers := fun r c =>
  let before := r - inZp 1 in
  if c == sent t before + inZp 1 then b before c else b r c.

Fixpoint all_gather t b : buffers := if t is s.+1 then take_step s (all_gather s b) else b.

Lemma takes t r c : (c == sent t (r - inZp 1) + inZp 1) = (r == ahead c t).
Proof.
rewrite /sent /ahead -addrA [- _ + _]addrC addrA subrK.
by rewrite [c == _]eq_sym subr_eq.
Qed.

Lemma behind c : ahead c n = c - inZp 1.
Proof.
apply/eqP; rewrite eq_sym subr_eq -aheadS /ahead.
by rewrite (_ : inZp n.+1 = 0) ?addr0 //; apply: val_inj; rewrite /= modnn.
Qed.

(** After t steps the t ranks from c on have chunk c, as rank c + n has. *)
Lemma passed_on t b c k : (t <= n)%N -> (k < t)%N || (k == n) ->
  all_gather t b (ahead c k) c = b (ahead c n) c.
Proof.
elim: t k => [|t IH] k tn /=; first by move/eqP->.
move=> reached; rewrite /take_step takes; case: eqP => [->|differ].
- case: t {reached} IH tn => [|t] IH tn.
    by rewrite ahead0 -behind; apply: IH; rewrite ?eqxx ?orbT.
  by rewrite aheadS addrK; apply: IH; rewrite ?ltnSn // ltnW.
- apply: IH; first exact: ltnW.
  case/orP: reached => [|->]; last by rewrite orbT.
  by rewrite ltnS leq_eqVlt => /orP[/eqP same|->] //; case: differ; rewrite same.
Qed.

Theorem ring_all_gather b r c : all_gather n b r c = b (ahead c n) c.
Proof.
have -> : r = ahead c (r - c : rank) by rewrite /ahead valZpK addrC subrK.
by apply: passed_on => //; rewrite orbC -leq_eqVlt -ltnS ltn_ord.
Qed.

Theorem ring_all_reduce x r c : all_gather n (reduce_scatter n x) r c = \sum_s x s c.
Proof. by rewrite ring_all_gather ring_reduce_scatter. Qed.

(** Elements that rank r sends, when chunk c has [size c] of them. *)
Section Traffic.
Variable size : rank -> nat.

Definition scatter_traffic r : nat := (\sum_(t < n) size (sent t r))%N.
Definition gather_traffic r : nat := (\sum_(t < n) size (sent t r + inZp 1)%R)%N.
Definition traffic r : nat := (scatter_traffic r + gather_traffic r)%N.

(** All ranks together send the buffer 2 (N - 1) times, whatever the sizes of the chunks. *)
Theorem ring_traffic_total :
  (\sum_r traffic r = 2 * n * \sum_c size c)%N.
Proof.
rewrite big_split /= -mulnA mul2n -addnn; congr (_ + _)%N.
- transitivity (\sum_(t < n) \sum_c size c)%N; last by rewrite sum_nat_const card_ord.
  rewrite /scatter_traffic exchange_big; apply: eq_bigr => t _.
  by rewrite [RHS](reindex_inj (addIr (- inZp t))).
- transitivity (\sum_(t < n) \sum_c size c)%N; last by rewrite sum_nat_const card_ord.
  rewrite /gather_traffic exchange_big; apply: eq_bigr => t _.
  rewrite [RHS](reindex_inj (addIr (- inZp t + inZp 1))) /=.
  by apply: eq_bigr => r _; rewrite addrA.
Qed.

(** With N equal chunks of a buffer of S elements each rank sends 2 (N - 1) / N of S. *)
Theorem ring_traffic_even s r : (forall c, size c = s) ->
  (n.+1 * traffic r = 2 * n * \sum_c size c)%N.
Proof.
move=> even; have all_of (m : nat) f : (\sum_(t < m) size (f t) = m * s)%N.
  by under eq_bigr => t _ do rewrite even; rewrite sum_nat_const card_ord.
rewrite /traffic /scatter_traffic /gather_traffic !all_of addnn -mul2n mulnCA -mulnA.
by congr (2 * _)%N; apply: mulnCA.
Qed.

End Traffic.
End Ring.

(** The collectives over one axis of a mesh, their types, and the table of duals.

    Claim: for any number of ranks and any way of cutting a tensor over them (uneven, or not in one
    piece), the backward collective in `mfun.comm.DUALS` is the transpose of the forward one.

    The axis has n + 1 ranks. A value is what every rank holds, [rank -> elem -> R], over any ring.
    [elem] numbers the elements of the whole tensor; where a rank holds a piece only, its type says
    which elements count. *)
From mathcomp Require Import all_ssreflect all_algebra.
Set Implicit Arguments.
Unset Strict Implicit.
Unset Printing Implicit Defensive.
Import GRing.Theory.
Local Open Scope ring_scope.

Section Table.
Variables (n : nat) (elem : finType).
Local Notation rank := 'I_n.+1.

(** Of a varying value, [held r i] says that element i on rank r counts. *)
Inductive type :=
  | Replicate | Partial | Invariant
  | Varying of (rank -> elem -> bool).

(** The letter of a type in `DUALS`. *)
Inductive letters := R_ | P_ | I_ | V_.

Definition letter (t : type) : letters :=
  match t with Replicate => R_ | Partial => P_ | Invariant => I_ | Varying _ => V_ end.

(** Each element on its owner; every rank's tensor by itself. *)
Definition cut (own : elem -> rank) : type := Varying (fun r i => r == own i).
Definition each : type := Varying (fun _ _ => true).

(** The type of the gradient of a value. *)
Definition cotangent (t : type) : type :=
  match t with
  | Replicate => Partial
  | Partial => Replicate
  | Invariant => Invariant
  | Varying held => Varying held
  end.

(** [AllToAll a b] goes from pieces cut by [a] to pieces cut by [b]. *)
Inductive collective :=
  | Copy | Reduce | AllReduce
  | Gather of (elem -> rank) | ReduceScatter of (elem -> rank)
  | Split of (elem -> rank) | Unsplit of (elem -> rank)
  | AllToAll of (elem -> rank) & (elem -> rank)
  | Shift of rank | Broadcast of rank | Collect of rank.

Definition takes (c : collective) : type :=
  match c with
  | Copy => Invariant
  | Reduce | AllReduce => Partial
  | Gather own => cut own
  | ReduceScatter _ => Partial
  | Split _ => Invariant
  | Unsplit own => cut own
  | AllToAll a _ => cut a
  | Shift _ | Broadcast _ => each
  | Collect _ => Partial
  end.

Definition gives (c : collective) : type :=
  match c with
  | Copy => Replicate
  | Reduce => Invariant
  | AllReduce => Replicate
  | Gather _ => Replicate
  | ReduceScatter own => cut own
  | Split own => cut own
  | Unsplit _ => Invariant
  | AllToAll _ b => cut b
  | Shift _ => each
  | Broadcast _ => Replicate
  | Collect _ => each
  end.

Definition dual (c : collective) : collective :=
  match c with
  | Copy => Reduce
  | Reduce => Copy
  | AllReduce => AllReduce
  | Gather own => ReduceScatter own
  | ReduceScatter own => Gather own
  | Split own => Unsplit own
  | Unsplit own => Split own
  | AllToAll a b => AllToAll b a
  | Shift k => Shift (- k)
  | Broadcast root => Collect root
  | Collect root => Broadcast root
  end.

(** The backward of a collective takes the gradient of its result and gives that of its input. *)
Theorem dual_types c :
  takes (dual c) = cotangent (gives c) /\ gives (dual c) = cotangent (takes c).
Proof. by case: c. Qed.

Theorem dual_involutive c : dual (dual c) = c.
Proof. by case: c => //= k; rewrite opprK. Qed.

End Table.

Arguments letter {n elem}.
Arguments takes {n elem}.
Arguments gives {n elem}.
Arguments dual {n elem}.
Arguments Replicate {n elem}.
Arguments Partial {n elem}.
Arguments Invariant {n elem}.
Arguments each {n elem}.
Arguments Copy {n elem}.
Arguments Reduce {n elem}.
Arguments AllReduce {n elem}.
Arguments Shift {n elem}.
Arguments Broadcast {n elem}.
Arguments Collect {n elem}.

Section Meaning.
Variables (R : ringType) (n : nat) (elem : finType).
Local Notation rank := 'I_n.+1.
Definition value := rank -> elem -> R.
Implicit Types (x g : value) (t : type n elem) (c : collective n elem) (own : elem -> rank).

(** What each collective does. *)
Definition run c x : value := fun r i =>
  match c with
  | Copy | Split _ => x r i
  | Reduce | AllReduce | ReduceScatter _ => \sum_s x s i
  | Gather own | Unsplit own | AllToAll own _ => x (own i) i
  | Shift k => x (r - k) i
  | Broadcast root => x root i
  | Collect root => if r == root then \sum_s x s i else 0
  end.

(** What a type promises: replicated and invariant values are equal on all ranks. *)
Definition valid t x : Prop :=
  match t with
  | Replicate | Invariant => forall r s i, x r i = x s i
  | Partial | Varying _ => True
  end.

(** Two values that are the same as far as their type can tell. *)
Definition agree t x g : Prop :=
  match t with
  | Varying held => forall r i, held r i -> x r i = g r i
  | _ => forall r i, x r i = g r i
  end.

(** The change of the loss when a value of type t with gradient g moves by x. An invariant is one
    value, counted once; else every rank contributes. *)
Definition dot t x g : R :=
  match t with
  | Invariant => \sum_i x ord0 i * g ord0 i
  | Replicate | Partial => \sum_r \sum_i x r i * g r i
  | Varying held => \sum_r \sum_(i | held r i) x r i * g r i
  end.

(** The one tensor that a typed value stands for. *)
Definition whole t x : elem -> R := fun i =>
  match t with
  | Replicate | Invariant => x ord0 i
  | Partial => \sum_r x r i
  | Varying held => \sum_(r | held r i) x r i
  end.

Definition transpose c d : Prop :=
  forall x g, valid (takes c) x -> valid (cotangent (gives c)) g ->
    dot (gives c) (run c x) g = dot (takes c) x (run d g).

Lemma owned own (f : rank -> elem -> R) :
  \sum_r \sum_(i | r == own i) f r i = \sum_i f (own i) i.
Proof.
rewrite (exchange_big_dep xpredT) //=.
by apply: eq_bigr => i _; exact: big_pred1_eq.
Qed.

Lemma whole_cut own x i : whole (cut own) x i = x (own i) i.
Proof. exact: big_pred1_eq. Qed.

Theorem copy_transpose : transpose Copy Reduce.
Proof.
move=> x g /= equal _; rewrite /run exchange_big; apply: eq_bigr => i _.
by rewrite mulr_sumr; apply: eq_bigr => r _; rewrite (equal r ord0).
Qed.

Theorem reduce_transpose : transpose Reduce Copy.
Proof.
move=> x g /= _ equal; rewrite /run [RHS]exchange_big; apply: eq_bigr => i _.
by rewrite mulr_suml; apply: eq_bigr => r _; rewrite (equal r ord0).
Qed.

Theorem all_reduce_transpose : transpose AllReduce AllReduce.
Proof.
move=> x g _ _; rewrite /= /run exchange_big [RHS]exchange_big; apply: eq_bigr => i _.
by rewrite -mulr_sumr -mulr_suml.
Qed.

Theorem gather_transpose own : transpose (Gather own) (ReduceScatter own).
Proof.
move=> x g _ _; rewrite /= /run owned exchange_big; apply: eq_bigr => i _.
by rewrite -mulr_sumr.
Qed.

Theorem reduce_scatter_transpose own : transpose (ReduceScatter own) (Gather own).
Proof.
move=> x g _ _; rewrite /= /run owned [RHS]exchange_big; apply: eq_bigr => i _.
by rewrite -mulr_suml.
Qed.

Theorem split_transpose own : transpose (Split own) (Unsplit own).
Proof.
move=> x g /= equal _; rewrite /run owned; apply: eq_bigr => i _.
by rewrite (equal (own i) ord0).
Qed.

Theorem unsplit_transpose own : transpose (Unsplit own) (Split own).
Proof.
move=> x g /= _ equal; rewrite /run owned; apply: eq_bigr => i _.
by rewrite (equal (own i) ord0).
Qed.

Theorem all_to_all_transpose a b : transpose (AllToAll a b) (AllToAll b a).
Proof. by move=> x g _ _; rewrite /= /run !owned. Qed.

Theorem shift_transpose k : transpose (Shift k) (Shift (- k)).
Proof.
move=> x g _ _; rewrite /= /run (reindex_inj (addIr k)) /=.
by apply: eq_bigr => r _; apply: eq_bigr => i _; rewrite addrK opprK.
Qed.

Theorem broadcast_transpose root : transpose (Broadcast root) (Collect root).
Proof.
move=> x g _ _; rewrite /= /run exchange_big [RHS]exchange_big; apply: eq_bigr => i _.
rewrite -mulr_sumr [RHS](bigD1 root) //= eqxx [X in _ = _ + X]big1 ?addr0 // => r /negPf ->.
by rewrite mulr0.
Qed.

Theorem collect_transpose root : transpose (Collect root) (Broadcast root).
Proof.
move=> x g _ _; rewrite /= /run exchange_big [RHS]exchange_big; apply: eq_bigr => i _.
rewrite -mulr_suml (bigD1 root) //= eqxx [X in _ + X]big1 ?addr0 // => r /negPf ->.
by rewrite mul0r.
Qed.

(** The whole table at once. *)
Theorem dual_transpose c : transpose c (dual c).
Proof.
case: c => [|||own|own|own|own|a b|k|root|root] /=.
- exact: copy_transpose.
- exact: reduce_transpose.
- exact: all_reduce_transpose.
- exact: gather_transpose.
- exact: reduce_scatter_transpose.
- exact: split_transpose.
- exact: unsplit_transpose.
- exact: all_to_all_transpose.
- exact: shift_transpose.
- exact: broadcast_transpose.
- exact: collect_transpose.
Qed.

(** A collective keeps what its types promise. *)
Theorem run_valid c x : valid (takes c) x -> valid (gives c) (run c x).
Proof. by case: c => //= *; rewrite /run. Qed.

(** A collective reads only elements that count. *)
Theorem run_agree c x g : agree (takes c) x g -> agree (gives c) (run c x) (run c g).
Proof.
case: c => [|||own|own|own|own|a b|k|root|root] /= same r i; rewrite /run ?same //.
- by apply: eq_bigr => s _; rewrite same.
- by apply: eq_bigr => s _; rewrite same.
- by move=> _; apply: eq_bigr => s _; rewrite same.
- by move=> _; case: eqP => // _; apply: eq_bigr => s _; rewrite same.
Qed.

(** Those that move no element from place to place change how a tensor is laid out, not what it is. *)
Definition relays c : bool :=
  match c with Shift _ | Broadcast _ | Collect _ => false | _ => true end.

Theorem run_whole c x i : relays c -> valid (takes c) x ->
  whole (gives c) (run c x) i = whole (takes c) x i.
Proof.
by case: c => //= *; rewrite /run ?big_pred1_eq.
Qed.

End Meaning.

Arguments value R n elem : clear implicits.

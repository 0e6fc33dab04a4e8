(** Layers cut over the tensor-parallel axis compute what the whole layer computes, and so do their
    backwards, which are written here as `mfun.nn` writes them: with the dual collectives.

    Claim: for any number of ranks and any (uneven) distribution of features, heads, vocabulary rows
    and, under sequence parallelism, tokens.

    [T] tokens, [K] input features, [O] output features, [H] heads, [V] vocabulary. A weight is
    (out, in), as torch has it. [sp] is sequence parallelism. *)
From mathcomp Require Import all_ssreflect all_algebra.
From Mfun Require Import Collectives.
Set Implicit Arguments.
Unset Strict Implicit.
Unset Printing Implicit Defensive.
Import GRing.Theory.
Local Open Scope ring_scope.

(** One device. *)
Section Dense.
Variables (R : comRingType) (T K O : finType).
Implicit Types (x : T * K -> R) (w : O * K -> R) (b : O -> R) (g : T * O -> R).

Definition linear x w : T * O -> R := fun i => \sum_k x (i.1, k) * w (i.2, k).
Definition grad_x g w : T * K -> R := fun i => \sum_o g (i.1, o) * w (o, i.2).
Definition grad_w g x : O * K -> R := fun i => \sum_t g (t, i.1) * x (t, i.2).
Definition grad_b g : O -> R := fun o => \sum_t g (t, o).

Lemma sum_pairs (A B : finType) (f : A * B -> R) : \sum_p f p = \sum_a \sum_b f (a, b).
Proof. by rewrite pair_big; apply: eq_bigr; case. Qed.

(** The dense backward is the transpose of the dense forward, in each argument. *)
Theorem grad_x_transpose x w g : \sum_i linear x w i * g i = \sum_i x i * grad_x g w i.
Proof.
rewrite !sum_pairs; apply: eq_bigr => t _ /=.
under eq_bigr => o _ do rewrite mulr_suml.
rewrite exchange_big; apply: eq_bigr => k _.
by rewrite mulr_sumr; apply: eq_bigr => o _; rewrite -mulrA [w _ * _]mulrC.
Qed.

Theorem grad_w_transpose x w g : \sum_i linear x w i * g i = \sum_i w i * grad_w g x i.
Proof.
rewrite !sum_pairs exchange_big; apply: eq_bigr => o _ /=.
under eq_bigr => t _ do rewrite mulr_suml.
rewrite exchange_big; apply: eq_bigr => k _.
rewrite mulr_sumr; apply: eq_bigr => t _.
by rewrite [x _ * _]mulrC -mulrA [x _ * _]mulrC.
Qed.

End Dense.

Section Parallel.
Variables (R : comRingType) (n : nat) (sp : bool) (T : finType).
Local Notation rank := 'I_n.+1.
Variable own_t : T -> rank.

Section Doors.
Variable K : finType.

Definition tokens (i : T * K) : rank := own_t i.1.
Definition enter : collective n [finType of T * K] := if sp then Gather tokens else Copy.
Definition leave : collective n [finType of T * K] := if sp then ReduceScatter tokens else Reduce.

(** What enters: an invariant, or shards of the sequence. *)
Definition door : type n [finType of T * K] := takes enter.

Theorem leave_dual_enter : dual enter = leave /\ dual leave = enter.
Proof. by rewrite /enter /leave; case: sp. Qed.

Lemma leave_gives : gives leave = door.
Proof. by rewrite /leave /door /enter; case: sp. Qed.

Lemma enter_whole (x : value R n [finType of T * K]) r i :
  valid door x -> run enter x r i = whole door x i.
Proof.
rewrite /door /enter; case: sp => /= [_|equal]; last exact: equal.
by rewrite /run big_pred1_eq.
Qed.

Lemma leave_whole (y : value R n [finType of T * K]) i :
  whole door (run leave y) i = \sum_r y r i.
Proof. by rewrite /door /enter /leave /run; case: sp => /=; rewrite ?big_pred1_eq. Qed.

End Doors.

Section Layer.
Variables (K O : finType).

Section Column.
Variable own_o : O -> rank.
Let by_row (i : O * K) := own_o i.1.
Let by_out (i : T * O) := own_o i.2.

(** y = enter(x) w^T + b on the rows of w that a rank holds. *)
Definition column (x : value R n [finType of T * K]) (w : value R n [finType of O * K])
    (b : value R n O) : value R n [finType of T * O] :=
  fun r i => linear (run (@enter K) x r) (w r) i + b r i.2.

Theorem column_linear x w b i : valid (@door K) x ->
  whole (cut by_out) (column x w b) i =
  linear (whole (@door K) x) (whole (cut by_row) w) i + whole (cut own_o) b i.2.
Proof.
move=> ok; rewrite !whole_cut /column /linear; congr (_ + _).
by apply: eq_bigr => k _; rewrite enter_whole // whole_cut.
Qed.

(** dx = leave(dy w), dw = dy^T enter(x), db = sum of dy. *)
Definition column_dx (g : value R n [finType of T * O]) (w : value R n [finType of O * K]) :=
  run (@leave K) (fun r i => \sum_(o | r == own_o o) g r (i.1, o) * w r (o, i.2)).

Theorem column_backward_x g w i :
  whole (@door K) (column_dx g w) i = grad_x (whole (cut by_out) g) (whole (cut by_row) w) i.
Proof.
rewrite leave_whole owned; apply: eq_bigr => o _.
by rewrite !whole_cut.
Qed.

Theorem column_backward_w (g : value R n [finType of T * O]) x i : valid (@door K) x ->
  whole (cut by_row) (fun r => grad_w (g r) (run (@enter K) x r)) i =
  grad_w (whole (cut by_out) g) (whole (@door K) x) i.
Proof.
move=> ok; rewrite whole_cut; apply: eq_bigr => t _.
by rewrite enter_whole // whole_cut.
Qed.

Theorem column_backward_b (g : value R n [finType of T * O]) o :
  whole (cut own_o) (fun r => grad_b (g r)) o = grad_b (whole (cut by_out) g) o.
Proof. by rewrite whole_cut; apply: eq_bigr => t _; rewrite whole_cut. Qed.

End Column.

Section Row.
Variable own_k : K -> rank.
Let by_in (i : T * K) := own_k i.2.
Let by_column (i : O * K) := own_k i.2.

(** y = leave(x w^T) + b: a rank sums over the inputs that it holds. *)
Definition row (x : value R n [finType of T * K]) (w : value R n [finType of O * K])
    (b : value R n O) : value R n [finType of T * O] :=
  fun r i =>
    run (@leave O) (fun s j => \sum_(k | s == own_k k) x s (j.1, k) * w s (j.2, k)) r i + b r i.2.

Theorem row_linear x w b i : valid (@Invariant n O) b ->
  whole (@door O) (row x w b) i =
  linear (whole (cut by_in) x) (whole (cut by_column) w) i + whole (@Invariant n O) b i.2.
Proof.
move=> /= equal.
have -> : whole (@door O) (row x w b) i = \sum_k x (own_k k) (i.1, k) * w (own_k k) (i.2, k) + b ord0 i.2.
  rewrite /row /door /enter /leave; case: sp => /=; rewrite /run ?big_pred1_eq owned;
    congr (_ + _); exact: equal.
by congr (_ + _); apply: eq_bigr => k _; rewrite !whole_cut.
Qed.

(** dx = enter(dy) w, dw = enter(dy)^T x; the bias's is a summand under sequence parallelism. *)
Theorem row_backward_x (g : value R n [finType of T * O]) w i : valid (@door O) g ->
  whole (cut by_in) (fun r => grad_x (run (@enter O) g r) (w r)) i =
  grad_x (whole (@door O) g) (whole (cut by_column) w) i.
Proof.
move=> ok; rewrite whole_cut; apply: eq_bigr => o _.
by rewrite enter_whole // whole_cut.
Qed.

Theorem row_backward_w (g : value R n [finType of T * O]) x i : valid (@door O) g ->
  whole (cut by_column) (fun r => grad_w (run (@enter O) g r) (x r)) i =
  grad_w (whole (@door O) g) (whole (cut by_in) x) i.
Proof.
move=> ok; rewrite whole_cut; apply: eq_bigr => t _.
by rewrite enter_whole // whole_cut.
Qed.

Definition row_db (g : value R n [finType of T * O]) : value R n O :=
  fun r o => if sp then \sum_(t | r == own_t t) g r (t, o) else \sum_t g r (t, o).

Theorem row_backward_b (g : value R n [finType of T * O]) o :
  whole (if sp then @Partial n O else @Invariant n O) (row_db g) o = grad_b (whole (@door O) g) o.
Proof.
rewrite /row_db /door /enter; case: sp => //=.
by rewrite (owned own_t (fun r t => g r (t, o))); apply: eq_bigr => t _; rewrite whole_cut.
Qed.

End Row.
End Layer.

(** Between a column-cut and a row-cut layer: any function of one head's (or feature's) own values.
    With one feature a head it is an activation, with two a gated one; [J] are the values a head is
    computed from (its part of q, k and v), [D] what it gives. *)
Section Heads.
Variables (K H J D O : finType) (own_h : H -> rank).
Variable head : H -> {ffun T * J -> R} -> T -> D -> R.

Definition heads (y : T * (H * J) -> R) : T * (H * D) -> R :=
  fun i => head i.2.1 [ffun p => y (p.1, (i.2.1, p.2))] i.1 i.2.2.

Let own_in (h : H * J) := own_h h.1.
Let own_out (h : H * D) := own_h h.1.
Let by_in_row (i : (H * J) * K) := own_in i.1.
Let by_out_column (i : O * (H * D)) := own_out i.2.

Definition block x w_in b_in w_out b_out : value R n [finType of T * O] :=
  row own_out (fun r => heads (@column K _ x w_in b_in r)) w_out b_out.

Theorem attention_heads x w_in b_in w_out b_out i :
  valid (@door K) x -> valid (@Invariant n O) b_out ->
  whole (@door O) (block x w_in b_in w_out b_out) i =
  linear
    (heads (fun j => linear (whole (@door K) x) (whole (cut by_in_row) w_in) j
                     + whole (cut own_in) b_in j.2))
    (whole (cut by_out_column) w_out) i
  + whole (@Invariant n O) b_out i.2.
Proof.
move=> ok equal; rewrite row_linear //; congr (_ + _); apply: eq_bigr => d _; congr (_ * _).
rewrite whole_cut /heads /=; congr (head _ _ _ _); apply/ffunP => p; rewrite !ffunE.
rewrite -(column_linear own_in w_in b_in _ ok) whole_cut //.
Qed.

End Heads.

(** The MLP: one value a feature. *)
Section Mlp.
Variables (K F O : finType) (own_f : F -> rank) (act : R -> R).

Let by_f (i : F * K) := own_f i.1.
Let by_f_out (i : O * F) := own_f i.2.

Theorem mlp x w_in b_in w_out b_out i :
  valid (@door K) x -> valid (@Invariant n O) b_out ->
  whole (@door O) (row own_f (fun r j => act (column x w_in b_in r j)) w_out b_out) i =
  linear
    (fun j => act (linear (whole (@door K) x) (whole (cut by_f) w_in) j + whole (cut own_f) b_in j.2))
    (whole (cut by_f_out) w_out) i
  + whole (@Invariant n O) b_out i.2.
Proof.
move=> ok equal; rewrite row_linear //; congr (_ + _); apply: eq_bigr => f _; congr (_ * _).
by rewrite whole_cut -(column_linear own_f w_in b_in _ ok) whole_cut.
Qed.

(** Its backward: [slope j] is the activation's derivative where rank-local h is. *)
Theorem mlp_backward (g : value R n [finType of T * O])
    (slope : value R n [finType of T * F]) w_in w_out i :
  valid (@door O) g ->
  whole (@door K)
    (column_dx own_f
      (fun r j => grad_x (run (@enter O) g r) (w_out r) j * slope r j) w_in) i =
  grad_x
    (fun j => grad_x (whole (@door O) g) (whole (cut by_f_out) w_out) j
              * whole (cut (fun j => own_f j.2)) slope j)
    (whole (cut by_f) w_in) i.
Proof.
move=> ok; rewrite column_backward_x; apply: eq_bigr => f _; congr (_ * _).
rewrite !whole_cut; congr (_ * _).
by rewrite -(row_backward_x own_f _ _ ok) whole_cut.
Qed.

End Mlp.

(** A rank gives the rows of its own tokens, and zero for others. *)
Section Embedding.
Variables (V D : finType) (own_v : V -> rank) (token : T -> V).

Let by_v (i : V * D) := own_v i.1.

Definition embedding (w : value R n [finType of V * D]) : value R n [finType of T * D] :=
  run (@leave D) (fun r i => if r == own_v (token i.1) then w r (token i.1, i.2) else 0).

Theorem vocab_embedding w i :
  whole (@door D) (embedding w) i = whole (cut by_v) w (token i.1, i.2).
Proof. by rewrite leave_whole whole_cut -big_mkcond big_pred1_eq. Qed.

(** A row's gradient is the sum over the tokens that name it. *)
Theorem vocab_embedding_backward (g : value R n [finType of T * D]) i : valid (@door D) g ->
  whole (cut by_v) (fun r j => \sum_(t | token t == j.1) run (@enter D) g r (t, j.2)) i =
  \sum_(t | token t == i.1) whole (@door D) g (t, i.2).
Proof. by move=> ok; rewrite whole_cut; apply: eq_bigr => t _; rewrite enter_whole. Qed.

End Embedding.
End Parallel.

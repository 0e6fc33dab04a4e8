(** Ranks, their coordinates on the axes of a mesh, and the groups they form: `mfun.mesh`.

    Claims, for any number of axes of any sizes: ranks and coordinates correspond one to one; the
    ranks that differ in the coordinates of some axes only form groups, equal in size, that
    partition the world; a factor of an axis is an axis.

    [sizes] are those of the axes, fastest first. The dense and the expert view of a mesh are two
    such lists with one product. *)
From mathcomp Require Import all_ssreflect zify.
Set Implicit Arguments.
Unset Strict Implicit.
Unset Printing Implicit Defensive.

Definition world (sizes : seq nat) : nat := foldr muln 1 sizes.

Fixpoint coords (sizes : seq nat) (r : nat) : seq nat :=
  if sizes is k :: rest then r %% k :: coords rest (r %/ k) else [::].

Fixpoint rank (sizes cs : seq nat) : nat :=
  match sizes, cs with
  | k :: rest, c :: cs => c + k * rank rest cs
  | _, _ => 0
  end.

Lemma size_coords sizes r : size (coords sizes r) = size sizes.
Proof. by elim: sizes r => //= k rest IH r; rewrite IH. Qed.

(** As the code has it: a coordinate is rank // stride % size. *)
Theorem coords_stride sizes r i : i < size sizes ->
  nth 0 (coords sizes r) i = r %/ world (take i sizes) %% nth 1 sizes i.
Proof.
elim: sizes r i => //= k rest IH r [|i] small /=; first by rewrite divn1.
by rewrite IH // -divnMA.
Qed.

Theorem rank_coords sizes r : r < world sizes -> rank sizes (coords sizes r) = r.
Proof.
elim: sizes r => [|k rest IH] r /=; first by rewrite ltnS leqn0 => /eqP ->.
case: (posnP k) => [->//|pos] small.
rewrite IH; first by rewrite addnC mulnC -divn_eq.
by rewrite ltn_divLR // mulnC.
Qed.

Theorem coords_rank sizes cs : all2 ltn cs sizes -> coords sizes (rank sizes cs) = cs.
Proof.
elim: sizes cs => [|k rest IH] [|c cs] //= /andP[ck ok].
have pos : 0 < k by apply: leq_ltn_trans ck.
by rewrite addnC mulnC modnMDl modn_small // divnMDl // divn_small // addn0 IH.
Qed.

Theorem rank_lt sizes cs : all2 ltn cs sizes -> rank sizes cs < world sizes.
Proof.
elim: sizes cs => [|k rest IH] [|c cs] //= /andP[ck /IH small].
apply: (@leq_trans (k + k * rank rest cs)); first by rewrite ltn_add2r.
by rewrite -mulnS leq_pmul2l // (leq_ltn_trans _ ck).
Qed.

Theorem coords_lt sizes r : r < world sizes -> all2 ltn (coords sizes r) sizes.
Proof.
elim: sizes r => [|k rest IH] r //=; case: (posnP k) => [->//|pos] small.
by rewrite ltn_pmod //= IH // ltn_divLR // mulnC.
Qed.

(** An axis of size inner * outer is two axes: c = outer coordinate * inner + inner coordinate. *)
Theorem factor inner outer rest r : 0 < inner -> 0 < outer ->
  let cs := coords (inner :: outer :: rest) r in
  coords (inner * outer :: rest) r = nth 0 cs 1 * inner + nth 0 cs 0 :: drop 2 cs.
Proof.
move=> i0 o0 /=; rewrite drop0 -divnMA; congr (_ :: _).
set q := r %/ inner; have eq : r = q %/ outer * (inner * outer) + (q %% outer * inner + r %% inner).
  by rewrite addnA [inner * _]mulnC mulnA -mulnDl -!divn_eq.
have small : q %% outer * inner + r %% inner < inner * outer.
  by have := ltn_pmod r i0; have := ltn_pmod q o0; nia.
by rewrite {1}eq modnMDl modn_small.
Qed.

Theorem factor_world inner outer rest : world (inner * outer :: rest) = world (inner :: outer :: rest).
Proof. by rewrite /= mulnA. Qed.

(** Groups: [inside] marks the axes that vary in a group. *)
Fixpoint weave (inside : bitseq) (a b : seq nat) : seq nat :=
  match inside with
  | true :: more => head 0 a :: weave more (behead a) b
  | false :: more => head 0 b :: weave more a (behead b)
  | [::] => [::]
  end.

Section Groups.
Variables (inside : bitseq) (sizes : seq nat).
Hypothesis marked : size inside = size sizes.

Definition moving : seq nat := mask inside sizes.
Definition fixed : seq nat := mask (map negb inside) sizes.

Definition member (j k : nat) : nat := rank sizes (weave inside (coords moving j) (coords fixed k)).

Definition group (k : nat) : seq nat := [seq member j k | j <- iota 0 (world moving)].
Definition groups : seq (seq nat) := [seq group k | k <- iota 0 (world fixed)].

End Groups.

Lemma world_weave inside sizes : size inside = size sizes ->
  world (moving inside sizes) * world (fixed inside sizes) = world sizes.
Proof.
rewrite /moving /fixed; elim: inside sizes => [|[] more IH] [|k rest] //= [/IH <-].
  by rewrite mulnA.
by rewrite mulnCA.
Qed.

Lemma weave_lt inside sizes a b : size inside = size sizes ->
  all2 ltn a (moving inside sizes) -> all2 ltn b (fixed inside sizes) ->
  all2 ltn (weave inside a b) sizes.
Proof.
rewrite /moving /fixed; elim: inside sizes a b => [|[] more IH] [|k rest] //= a b [eq].
  by case: a => //= c a /andP[-> /IH]; apply.
by case: b => //= c b la /andP[-> lb]; apply: IH.
Qed.

Lemma mask_weave inside sizes a b :
  size inside = size sizes -> size a = size (moving inside sizes) ->
  mask inside (weave inside a b) = a.
Proof.
rewrite /moving; elim: inside sizes a b => [|[] more IH] [|k rest] a b //=.
- by case: a.
- by case=> eq; case: a => //= c a [/(IH _ _ _ eq) ->].
- by case=> eq; apply: IH.
Qed.

Lemma mask_weave_fixed inside sizes a b :
  size inside = size sizes -> size b = size (fixed inside sizes) ->
  mask (map negb inside) (weave inside a b) = b.
Proof.
rewrite /fixed; elim: inside sizes a b => [|[] more IH] [|k rest] a b //=.
- by case: b.
- by case=> eq; apply: IH.
- by case=> eq; case: b => //= c b [/(IH _ _ _ eq) ->].
Qed.

Section Partition.
Variables (inside : bitseq) (sizes : seq nat).
Hypothesis marked : size inside = size sizes.
Local Notation moving := (moving inside sizes).
Local Notation fixed := (fixed inside sizes).
Local Notation member := (member inside sizes).

Lemma member_coords j k : j < world moving -> k < world fixed ->
  coords sizes (member j k) = weave inside (coords moving j) (coords fixed k).
Proof. by move=> jl kl; rewrite coords_rank // weave_lt // coords_lt. Qed.

(** Ranks of one group agree on the other axes: their coordinates there are the group's number. *)
Theorem group_agrees j k : j < world moving -> k < world fixed ->
  mask (map negb inside) (coords sizes (member j k)) = coords fixed k.
Proof. by move=> jl kl; rewrite member_coords // (mask_weave_fixed _ marked) ?size_coords. Qed.

Theorem group_differs j k : j < world moving -> k < world fixed ->
  mask inside (coords sizes (member j k)) = coords moving j.
Proof. by move=> jl kl; rewrite member_coords // (mask_weave _ marked) ?size_coords. Qed.

Theorem group_size k : size (group inside sizes k) = world moving.
Proof. by rewrite size_map size_iota. Qed.

(** Every rank is in exactly one group. *)
Theorem groups_partition : perm_eq (flatten (groups inside sizes)) (iota 0 (world sizes)).
Proof.
have all_ : flatten (groups inside sizes) =
    [seq member j k | k <- iota 0 (world fixed), j <- iota 0 (world moving)].
  by [].
have once : uniq (flatten (groups inside sizes)).
  rewrite all_; apply: allpairs_uniq; try exact: iota_uniq.
  move=> [k j] [k' j'] /allpairsP[[a b] /= [ka jb [-> ->]]] /allpairsP[[c d] /= [kc jd [-> ->]]] same.
  rewrite !mem_iota !add0n /= in ka jb kc jd.
  have := congr1 (fun r => mask (map negb inside) (coords sizes r)) same.
  rewrite !group_agrees // => /(congr1 (rank fixed)); rewrite !rank_coords // => ->.
  have := congr1 (fun r => mask inside (coords sizes r)) same.
  by rewrite !group_differs // => /(congr1 (rank moving)); rewrite !rank_coords // => ->.
have below : {subset flatten (groups inside sizes) <= iota 0 (world sizes)}.
  move=> r; rewrite all_ => /allpairsP[[k j] /= [kl jl ->]]; rewrite !mem_iota !add0n /= in kl jl *.
  by apply: rank_lt; apply: weave_lt => //; apply: coords_lt.
have fits : size (iota 0 (world sizes)) <= size (flatten (groups inside sizes)).
  by rewrite all_ size_allpairs !size_iota mulnC world_weave.
have [_ same] := uniq_min_size once below fits.
by apply: uniq_perm => //; exact: iota_uniq.
Qed.

End Partition.

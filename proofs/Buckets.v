(** Where each element of each leaf lies in the flat buffers: `mfun.flat`.

    Claims: spans are disjoint and in order, with less than one alignment of padding before each;
    without alignment they cover the buffer; every leaf is in one bucket; equal shards partition the
    buffer and cut every span in pieces that partition it; views and concatenation are inverse;
    padding adds nothing to any sum, and reductions commute with views. *)
From mathcomp Require Import all_ssreflect all_algebra zify.
Set Implicit Arguments.
Unset Strict Implicit.
Unset Printing Implicit Defensive.

(** The least multiple of d that is at least k. *)
Definition round_up (k d : nat) : nat := (k + d.-1) %/ d * d.

Lemma round_up_ge k d : 0 < d -> k <= round_up k d.
Proof.
move=> pos; rewrite -(leq_add2r ((k + d.-1) %% d)) -divn_eq leq_add2l.
by rewrite -ltnS prednK // ltn_pmod.
Qed.

Lemma round_up_lt k d : 0 < d -> round_up k d < k + d.
Proof.
by move=> pos; apply: leq_ltn_trans (leq_trunc_div _ _) _; rewrite ltn_add2l prednK.
Qed.

Lemma round_up_dvd k d : d %| round_up k d.
Proof. exact: dvdn_mull. Qed.

Theorem round_up_least k d l : 0 < d -> d %| l -> k <= l -> round_up k d <= l.
Proof.
move=> pos /dvdnP[q ->] le; rewrite leq_pmul2r // -ltnS ltn_divLR // mulSn.
by rewrite -ltn_subRL in le *; lia.
Qed.

Lemma round_up1 k : round_up k 1 = k.
Proof. by rewrite /round_up addn0 divn1 muln1. Qed.

Definition span : Type := (nat * nat)%type.
Definition inside (x : nat) (s : span) : bool := s.1 <= x < s.2.

(** The spans of leaves of these sizes, from element [used] on; and where the last one ends. *)
Fixpoint spans (align used : nat) (sizes : seq nat) : seq span :=
  if sizes is k :: rest
  then let start := round_up used align in (start, start + k) :: spans align (start + k) rest
  else [::].

Fixpoint used_by (align used : nat) (sizes : seq nat) : nat :=
  if sizes is k :: rest then used_by align (round_up used align + k) rest else used.

(** Size of a sharded bucket. *)
Definition padded (used shards pad : nat) : nat := round_up used (lcmn shards pad).

Section Spans.
Variable align : nat.
Hypothesis aligned : 0 < align.
Implicit Types (sizes : seq nat) (u x : nat).

Theorem spans_sizes u sizes : [seq s.2 - s.1 | s <- spans align u sizes] = sizes.
Proof. by elim: sizes u => //= k rest IH u; rewrite addKn IH. Qed.

Theorem spans_aligned u sizes : all (fun s => align %| s.1) (spans align u sizes).
Proof. by elim: sizes u => //= k rest IH u; rewrite round_up_dvd IH. Qed.

Lemma used_ge u sizes : u <= used_by align u sizes.
Proof.
elim: sizes u => //= k rest IH u.
exact: leq_trans (leq_trans (round_up_ge u aligned) (leq_addr _ _)) (IH _).
Qed.

Lemma spans_within u sizes x :
  has (inside x) (spans align u sizes) -> u <= x < used_by align u sizes.
Proof.
elim: sizes u => //= k rest IH u /orP[/andP[/= low high]|/IH /andP[low ->]].
  rewrite (leq_trans (round_up_ge u aligned) low) /=.
  exact: leq_trans high (used_ge _ _).
by rewrite andbT; apply: leq_trans low; apply: leq_trans (leq_addr _ _); apply: round_up_ge.
Qed.

(** No element of the buffer belongs to two leaves. *)
Theorem spans_disjoint u sizes x : count (inside x) (spans align u sizes) <= 1.
Proof.
elim: sizes u => //= k rest IH u.
case: (boolP (inside x _)) => [/andP[/= _ high]|_]; last exact: IH.
have -> : count (inside x) (spans align (round_up u align + k) rest) = 0; last by [].
apply/eqP; rewrite -leqn0 leqNgt -has_count; apply/negP => /spans_within /andP[low _].
by rewrite leqNgt high in low.
Qed.

(** Less than one alignment is lost before each leaf. *)
Theorem padding_bounded u sizes :
  used_by align u sizes + size sizes <= u + sumn sizes + size sizes * align.
Proof.
elim: sizes u => [|k rest IH] u /=; first by rewrite mul0n !addn0.
have := IH (round_up u align + k); have := round_up_lt u aligned; rewrite mulSn; lia.
Qed.

End Spans.

(** Without alignment (a buffer that is not sharded) every element belongs to exactly one leaf. *)
Theorem spans_cover u sizes x :
  count (inside x) (spans 1 u sizes) = (u <= x < used_by 1 u sizes).
Proof.
elim: sizes u => [|k rest IH] u /=; first by rewrite andbC; case: ltngtP.
rewrite IH round_up1 /inside /=; have := @used_ge 1 isT (u + k) rest; lia.
Qed.

Theorem used_is_sum u sizes : used_by 1 u sizes = u + sumn sizes.
Proof. by elim: sizes u => [|k rest IH] u /=; rewrite ?addn0 // IH round_up1 addnA. Qed.

(** Shards: [size / shards] elements each. *)
Theorem padded_divides used shards pad : 0 < shards -> 0 < pad ->
  [/\ used <= padded used shards pad, shards %| padded used shards pad,
      pad %| padded used shards pad & padded used shards pad < used + lcmn shards pad].
Proof.
move=> s0 p0; have pos : 0 < lcmn shards pad by rewrite lcmn_gt0 s0.
by split; [exact: round_up_ge | exact: dvdn_trans (dvdn_lcml _ _) (round_up_dvd _ _) |
  exact: dvdn_trans (dvdn_lcmr _ _) (round_up_dvd _ _) | exact: round_up_lt].
Qed.

Definition shard_range (part i : nat) : span := (i * part, i.+1 * part).

(** An element is in one shard: the quotient. *)
Theorem shards_partition part i x : 0 < part ->
  inside x (shard_range part i) = (x %/ part == i).
Proof.
move=> pos; rewrite /inside /= -leq_divRL // -ltn_divLR //.
by rewrite ltnS andbC -eqn_leq.
Qed.

Theorem owner_exists shards part x : 0 < part -> x < shards * part -> x %/ part < shards.
Proof. by move=> pos; rewrite ltn_divLR. Qed.

(** What a shard holds of a span; the pieces of all shards partition the span. *)
Definition piece (s : span) (t : span) : span := (maxn s.1 t.1, minn s.2 t.2).

Theorem piece_inside s t x : inside x (piece s t) = inside x s && inside x t.
Proof. by rewrite /inside /= geq_max leq_min andbACA. Qed.

Theorem pieces_partition s shards part x : 0 < part -> s.2 <= shards * part ->
  \sum_(i < shards) inside x (piece s (shard_range part i)) = inside x s.
Proof.
move=> pos fits; under eq_bigr => i _ do rewrite piece_inside shards_partition //.
case: (boolP (inside x s)) => [/andP[_ high]|_]; last by rewrite big1.
have here : x %/ part < shards by rewrite owner_exists // (leq_trans high).
by rewrite (bigD1 (Ordinal here)) //= eqxx big1 // => i; rewrite -val_eqE /= eq_sym => /negPf ->.
Qed.

(** Buffers hold numbers, and zero in the padding. *)
Section Views.
Local Open Scope ring_scope.
Import GRing.Theory.
Variable R : ringType.
Implicit Types (b : nat -> R) (leaves : seq (seq R)).

Definition view b (s : span) : seq R := mkseq (fun k => b (s.1 + k)%N) (s.2 - s.1)%N.

Fixpoint pack (align u : nat) leaves : nat -> R := fun x =>
  if leaves is l :: rest then
    let start := round_up u align in
    if (x < start)%N then 0
    else if (x < start + size l)%N then nth 0 l (x - start)%N
    else pack align (start + size l) rest x
  else 0.

Lemma view_ext b b' s : (forall x, (s.1 <= x)%N -> b x = b' x) -> view b s = view b' s.
Proof. by move=> same; apply: eq_map => k; apply: same; apply: leq_addr. Qed.

Lemma spans_from align u sizes s : (0 < align)%N -> s \in spans align u sizes -> (u <= s.1)%N.
Proof.
move=> pos; elim: sizes u => //= k rest IH u; rewrite inE => /orP[/eqP ->|/IH low] /=.
  exact: round_up_ge.
by apply: leq_trans low; apply: leq_trans (leq_addr _ _); apply: round_up_ge.
Qed.

(** What is put in a buffer is seen by the views. *)
Theorem view_pack align u leaves : (0 < align)%N ->
  map (view (pack align u leaves)) (spans align u (map size leaves)) = leaves.
Proof.
move=> pos; elim: leaves u => //= l rest IH u; congr (_ :: _).
  rewrite /view /= addKn -[RHS](mkseq_nth 0); apply/eq_in_map => k.
  rewrite mem_iota add0n => /= small.
  by rewrite ltnNge leq_addr /= ltn_add2l small addKn.
rewrite -[RHS](IH (round_up u align + size l)%N); apply/eq_in_map => s /(spans_from pos) from.
apply: view_ext => x sx; have := leq_trans from sx => low.
by rewrite ltnNge (leq_trans (leq_addr _ _) low) /= ltnNge low.
Qed.

(** A buffer is what its views put together, and zero in the padding. *)
Theorem pack_view align u b sizes x : (0 < align)%N ->
  pack align u (map (view b) (spans align u sizes)) x =
  if has (inside x) (spans align u sizes) then b x else 0.
Proof.
move=> pos; elim: sizes u => //= k rest IH u.
rewrite size_mkseq addKn IH /inside /=.
case: (ltnP x (round_up u align)) => [before|after] /=.
  case: ifP => // /(spans_within pos) /andP[low _].
  by move: (leq_trans (leq_addr _ _) low); rewrite leqNgt before.
case: ltnP => //= here; rewrite nth_mkseq ?subnKC //.
by rewrite /= addKn -(ltn_add2l (round_up u align)) subnKC.
Qed.

(** Padding is inert: a sum over the buffer is the sum over the leaves, of any function that maps
    zero to zero (the identity, squares, absolute values). *)
Theorem padding_inert (f : R -> R) align u leaves n : (0 < align)%N -> f 0 = 0 ->
  (used_by align u (map size leaves) <= n)%N ->
  \sum_(u <= x < n) f (pack align u leaves x) = \sum_(l <- leaves) \sum_(v <- l) f v.
Proof.
move=> pos f0; elim: leaves u => [|l rest IH] u /= fits.
  by rewrite big_nil big1 // => x _; rewrite f0.
set start := round_up u align in fits *.
have low : (u <= start)%N by apply: round_up_ge.
have high : (start + size l <= n)%N by apply: leq_trans fits; apply: used_ge.
rewrite (big_cat_nat _ _ _ low (leq_trans (leq_addr _ _) high)) /=.
rewrite (big_cat_nat _ _ _ (leq_addr (size l) start) high) /= big_cons.
rewrite [X in X + _]big_nat big1 ?add0r => [|x /andP[_ ->]]; last by rewrite f0.
congr (_ + _).
- rewrite -{1}[start]add0n big_addn addKn big_mkord (big_nth 0) big_mkord.
  by apply: eq_bigr => k _; rewrite ltnNge leq_addl /= addnC ltn_add2l ltn_ord addKn.
- rewrite -(IH (start + size l)%N fits) big_nat [RHS]big_nat; apply: eq_bigr => x /andP[sx _].
  by rewrite ltnNge (leq_trans (leq_addr _ _) sx) /= ltnNge sx.
Qed.

(** Reducing buffers and looking, or looking and reducing: the same. *)
Theorem reduce_then_view (rank : finType) (b : rank -> nat -> R) s k : (k < s.2 - s.1)%N ->
  nth 0 (view (fun x => \sum_r b r x) s) k = \sum_r nth 0 (view (b r) s) k.
Proof.
move=> small; rewrite nth_mkseq //; apply: eq_bigr => r _; rewrite nth_mkseq //.
Qed.

End Views.

(** The plan: leaves are walked backward, each goes to the open bucket of its key. *)
Record leaf := Leaf { name : nat; key : nat; tied : bool; elements : nat }.

(** A bucket: its key, its leaves (name, size), the place of the last one in backward order. *)
Definition filling : Type := (nat * seq (nat * nat) * nat)%type.
Definition Filling (k : nat) (ls : seq (nat * nat)) (place : nat) : filling := (k, ls, place).
Definition kind (f : filling) : nat := f.1.1.
Definition leaves (f : filling) : seq (nat * nat) := f.1.2.
Definition last (f : filling) : nat := f.2.

Definition sizes_of (f : filling) : seq nat := map snd (leaves f).
Definition used_of (align : nat) (f : filling) : nat := used_by align 0 (sizes_of f).

Section Plan.
Variables (limit : option nat) (align : nat).

Definition added (f : filling) (l : leaf) (place : nat) : filling :=
  Filling (kind f) (rcons (leaves f) (name l, elements l)) place.

Definition full (f : filling) : bool :=
  if limit is Some n then n <= used_of align f else false.

Definition of_key (k : nat) (fs : seq filling) := [seq f <- fs | kind f == k].
Definition of_others (k : nat) (fs : seq filling) := [seq f <- fs | kind f != k].

Fixpoint fill (place : nat) (todo : seq leaf) (opened closed : seq filling) : seq filling :=
  if todo is l :: rest then
    let closed := if tied l then closed ++ of_key (key l) opened else closed in
    let mine := if tied l then [::] else of_key (key l) opened in
    let others := of_others (key l) opened in
    let f := added (head (Filling (key l) [::] 0) mine) l place in
    if tied l || full f then fill place.+1 rest (others ++ behead mine) (closed ++ [:: f])
    else fill place.+1 rest (f :: others ++ behead mine) closed
  else closed ++ opened.

Definition plan (forward : seq leaf) : seq filling :=
  sort (fun f g => last f <= last g) (fill 0 (rev forward) [::] [::]).

Definition members (fs : seq filling) : seq nat := flatten [seq map fst (leaves f) | f <- fs].

Lemma members_cat fs gs : members (fs ++ gs) = members fs ++ members gs.
Proof. by rewrite /members map_cat flatten_cat. Qed.

Lemma members_perm fs gs : perm_eq fs gs -> perm_eq (members fs) (members gs).
Proof. by move=> same; apply: perm_flatten; apply: perm_map. Qed.

Lemma count_fill x place todo opened closed :
  count x (members (fill place todo opened closed)) =
  count x (members closed) + count x (members opened) + count x (map name todo).
Proof.
elim: todo place opened closed => [|l rest IH] place opened closed /=.
  by rewrite members_cat count_cat addn0.
have parts : count x (members opened) =
    count x (members (of_key (key l) opened)) + count x (members (of_others (key l) opened)).
  have same : perm_eq opened (of_key (key l) opened ++ of_others (key l) opened).
    by rewrite perm_sym; apply/permPl; apply: perm_filterC.
  by rewrite -count_cat -members_cat; move/permP: (members_perm same); apply.
have one f : count x (members [:: added f l place]) = count x (members [:: f]) + x (name l).
  by rewrite /members /= !cats0 map_rcons -cats1 count_cat /= addn0.
have cmD fs gs : count x (members (fs ++ gs)) = count x (members fs) + count x (members gs).
  by rewrite members_cat count_cat.
have cmC f fs : count x (members (f :: fs)) = count x (members [:: f]) + count x (members fs).
  by rewrite -cat1s cmD.
case: (tied l) => /=.
  by rewrite IH cats0 (cmD (_ ++ _) [:: _]) (cmD closed) one parts /=; lia.
case: (of_key (key l) opened) parts => [|f fs] parts /=; case: ifP => _.
- by rewrite IH cats0 (cmD closed) one parts /=; lia.
- by rewrite IH cats0 (cmC (added _ _ _)) one parts /=; lia.
- by rewrite IH (cmD closed) (cmD (of_others _ _)) one parts (cmC f fs); lia.
- by rewrite IH (cmC (added _ _ _)) (cmD (of_others _ _)) one parts (cmC f fs); lia.
Qed.

(** Every leaf is in exactly one bucket. *)
Theorem plan_keeps_leaves forward : perm_eq (members (plan forward)) (map name forward).
Proof.
have sorted_ : perm_eq (members (plan forward)) (members (fill 0 (rev forward) [::] [::])).
  by apply: members_perm; rewrite perm_sort.
apply: perm_trans sorted_ _; apply/permP => x; rewrite count_fill /= map_rev.
by rewrite count_rev.
Qed.

End Plan.

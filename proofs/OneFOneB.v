(** 1F1B never gets stuck, with any number of stages and of microbatches.

    [program] is `mfun.schedule.generators.one_f_one_b`; the messages between its ops are those of
    `mfun.schedule.with_p2p`: a send after the op that makes the message, a receive before the op
    that uses it, and what stands between two ops is posted together. Sends may block until they are
    received. The clock is the schedule's own: F i on stage s at time s + 2 i, B i at
    2 p - 1 - s + 2 i. *)
From mathcomp Require Import all_ssreflect zify.
From Mfun Require Import Network.
Set Implicit Arguments.
Unset Strict Implicit.
Unset Printing Implicit Defensive.

(** (false, i) is the forward, (true, i) the backward of microbatch i. *)
Definition op := (bool * nat)%type.
Definition F i : op := (false, i).
Definition B i : op := (true, i).

(** Any programs of forwards and backwards on a chain of p stages. *)
Section Chain.
Variables (p : nat) (prog : nat -> seq op).

(** Stage q uses what [o] makes on stage s: forwards go up, backwards down. *)
Definition user (s q : nat) (o : op) : bool := if o.1 then q.+1 == s else q == s.+1.

(** Stage s has a batch before each op and one after the last, and an end. *)
Definition len (s : nat) : nat := (size (prog s)).+2.

(** The op before batch j of stage s has sent to q: q must have posted the batch with the receive,
    which stands before the op that uses it. *)
Definition sends (s j q : nat) : nat :=
  if j is i.+1 then
    if (i < size (prog s)) && user s q (nth (F 0) (prog s) i)
    then (index (nth (F 0) (prog s) i) (prog q)).+1 else 0
  else 0.

(** The op after it takes from q: q must have posted the batch with the send, which stands after
    the op that makes it. *)
Definition receives (s j q : nat) : nat :=
  if (j < size (prog s)) && user q s (nth (F 0) (prog s) j)
  then (index (nth (F 0) (prog s) j) (prog q)).+2 else 0.

(** Batch k is posted when batch k - 1 is complete. *)
Definition need (s k q : nat) : nat :=
  if k is j.+1 then maxn (sends s j q) (receives s j q) else 0.

Variable time : nat -> op -> nat.
Hypothesis in_order : forall s : 'I_p, sorted ltn (map (time s) (prog s)).
Hypothesis next_tick : forall (s q : 'I_p) o, user s q o -> time q o = (time s o).+1.
Hypothesis both_ends : forall (s q : 'I_p) o, user s q o -> (o \in prog s) = (o \in prog q).
Implicit Types (s q : 'I_p) (o : op).

(** When a batch is posted: as the op before it ends. *)
Definition clock (s k : nat) : nat :=
  if k is j.+1 then
    if j < size (prog s) then (time s (nth (F 0) (prog s) j)).+1
    else if size (prog s) is i.+1 then (time s (nth (F 0) (prog s) i)).+2 else 1
  else 0.

Lemma later_op s i j : i < j < size (prog s) ->
  time s (nth (F 0) (prog s) i) < time s (nth (F 0) (prog s) j).
Proof.
move=> /andP[ij js]; have ib := ltn_trans ij js.
rewrite -!(nth_map (F 0) 0 (time s)) //.
by apply: (sorted_ltn_nth ltn_trans 0 (in_order s)); rewrite ?inE ?size_map.
Qed.

Lemma later_batch s k l : k < l < len s -> clock s k < clock s l.
Proof.
case: l => [//|l].
rewrite /len !ltnS => /andP[kl ls]; case: k kl => [|k] kl /=.
  by case: ifP => // _; case: (size (prog s)).
case: (ltnP l (size (prog s))) => [small|large].
  by rewrite (ltn_trans kl small) ltnS later_op // kl.
have small : k < size (prog s) by apply: leq_trans kl ls.
rewrite small; case E: (size (prog s)) small => [//|i]; rewrite ltnS leq_eqVlt !ltnS.
by case/orP=> [/eqP ->//|ki]; rewrite ltnW // later_op // ki E ltnSn.
Qed.

(** When the batch before an op is posted: not after the op. *)
Lemma clock_index s o : o \in prog s -> clock s (index o (prog s)) <= time s o.
Proof.
move=> os; case E: (index o (prog s)) => [//|j] /=.
have js : j.+1 < size (prog s) by rewrite -E index_mem.
rewrite (ltn_trans (ltnSn j) js) -[in X in _ < X](nth_index (F 0) os) E.
by apply: later_op; rewrite ltnSn.
Qed.

Lemma clock_after s o : o \in prog s -> clock s (index o (prog s)).+1 = (time s o).+1.
Proof. by move=> os /=; rewrite index_mem os nth_index. Qed.

Lemma need_len s k q : k < len s -> need s k q <= len q.
Proof.
case: k => // j _; rewrite /need geq_max /sends /receives /len; apply/andP; split.
- by case: j => // i; case: ifP => // _; rewrite ltnS; apply: leqW; apply: index_size.
- by case: ifP => // _; rewrite !ltnS index_size.
Qed.

(** What a send needs was posted by the time of the op that made the message. *)
Lemma send_clock s i q : i < size (prog s) -> user s q (nth (F 0) (prog s) i) ->
  clock q (index (nth (F 0) (prog s) i) (prog q)) <= (time s (nth (F 0) (prog s) i)).+1.
Proof.
move=> ib used; rewrite -(next_tick used); apply: clock_index.
by rewrite -(both_ends used) mem_nth.
Qed.

Lemma need_clock s k q : k < len s -> 0 < need s k q -> clock q (need s k q).-1 < clock s k.
Proof.
case: k => // j; rewrite /len !ltnS => jl; rewrite /need.
have send : 0 < sends s j q -> clock q (sends s j q).-1 < clock s j.+1.
  rewrite /sends; case: j jl => // i il; case: ifP => // /andP[ib used] _.
  apply: leq_ltn_trans (send_clock ib used) _ => /=.
  case: ifP => js; first by rewrite ltnS; apply: later_op; rewrite ltnSn.
  by have -> : size (prog s) = i.+1 by apply/eqP; rewrite eqn_leq ib leqNgt js.
have receive : 0 < receives s j q -> clock q (receives s j q).-1 < clock s j.+1.
  rewrite /receives; case: ifP => // /andP[js used] _.
  rewrite [_.-1]/= clock_after; last by rewrite (both_ends used) mem_nth.
  by rewrite /= js (next_tick used).
by case: (leqP (sends s j q) (receives s j q)) => _; [exact: receive | exact: send].
Qed.

(** Such programs never get stuck, in whatever order the stages run. *)
Theorem chain_never_stuck order a :
  let length s := len s in let waits s k q := need s k q in
  runs length waits (start _) order a -> maximal length waits a -> finished length a.
Proof.
exact: (clocked_never_stuck (clock := fun s => clock s) later_batch need_len need_clock).
Qed.

End Chain.

(** The generator. *)
Section OneFOneB.
Variables (p m : nat).

Definition warmup (s : nat) : nat := minn (p - s - 1) m.

Definition program (s : nat) : seq op :=
  [seq F i | i <- iota 0 (warmup s)]
  ++ flatten [seq [:: F (warmup s + i); B i] | i <- iota 0 (m - warmup s)]
  ++ [seq B i | i <- iota (m - warmup s) (warmup s)].

Definition time (s : nat) (o : op) : nat :=
  if o.1 then (2 * p).-1 - s + 2 * o.2 else s + 2 * o.2.

(** Numbers that increase, from lo on, and stay below hi. *)
Fixpoint climbs (lo : nat) (l : seq nat) (hi : nat) : bool :=
  if l is x :: rest then (lo <= x) && climbs x.+1 rest hi else lo <= hi.

Lemma climbs_lower lo lo' l hi : lo' <= lo -> climbs lo l hi -> climbs lo' l hi.
Proof. by case: l => [|x l] /= low; [exact: leq_trans | case/andP=> /(leq_trans low) ->]. Qed.

Lemma climbs_cat lo l mid l' hi : climbs lo l mid -> climbs mid l' hi -> climbs lo (l ++ l') hi.
Proof.
elim: l lo => [|x l IH] lo /=; first exact: climbs_lower.
by case/andP=> -> /IH up /up.
Qed.

Lemma climbs_sorted lo l hi : climbs lo l hi -> sorted ltn l.
Proof.
case: l => // x l /= /andP[_]; elim: l x => //= y l IH x /andP[-> /=].
exact: IH.
Qed.

Lemma climbs_every_second c a n :
  climbs (c + 2 * a) [seq c + 2 * i | i <- iota a n] (c + 2 * (a + n)).
Proof.
elim: n a => [|n IH] a /=; first by rewrite addn0.
rewrite leqnn /=; apply: (climbs_lower _ (_ : climbs (c + 2 * a.+1) _ _)); first lia.
by rewrite -addSnnS; apply: IH.
Qed.

Lemma climbs_pairs c a n :
  climbs (c + 2 * a) (flatten [seq [:: c + 2 * i; (c + 2 * i).+1] | i <- iota a n]) (c + 2 * (a + n)).
Proof.
elim: n a => [|n IH] a /=; first by rewrite addn0.
rewrite !leqnn /=; apply: (climbs_lower _ (_ : climbs (c + 2 * a.+1) _ _)); first lia.
by rewrite -addSnnS; apply: IH.
Qed.

Lemma times_climb s : s < p -> sorted ltn (map (time s) (program s)).
Proof.
move=> sp; rewrite /program !map_cat -!map_comp map_flatten -map_comp.
set w := warmup s.
apply: (@climbs_sorted (s + 2 * 0) _ ((2 * p).-1 - s + 2 * (m - w + w))).
apply: climbs_cat; first exact: (climbs_every_second s 0 w).
apply: (@climbs_cat _ _ (s + 2 * w + 2 * (m - w))).
- have [few|many] := leqP m (p - s - 1).
    have -> : m - w = 0 by rewrite /w /warmup; lia.
    by rewrite /= muln0 addn0.
  rewrite (eq_map (f2 := fun i => [:: s + 2 * w + 2 * i; (s + 2 * w + 2 * i).+1])).
    by have := climbs_pairs (s + 2 * w) 0 (m - w); rewrite muln0 !addn0 add0n.
  move=> i /=; rewrite /time /= /w /warmup; congr [:: _; _]; lia.
- apply: (climbs_lower _ (climbs_every_second ((2 * p).-1 - s) (m - w) w)).
  rewrite /w /warmup; lia.
Qed.

Lemma mem_program s o : (o \in program s) = (o.2 < m).
Proof.
have wm : warmup s <= m by rewrite /warmup geq_minr.
rewrite /program !mem_cat; apply/idP/idP.
- case/or3P=> [/mapP[i]|/flatten_mapP[i]|/mapP[i]]; rewrite mem_iota => ?; first by move=> -> /=; lia.
    by rewrite !inE => /orP[] /eqP -> /=; lia.
  by move=> -> /=; lia.
- case: o => [[] i] /= im.
    have [early|late] := ltnP i (m - warmup s).
      apply/or3P/Or32/flatten_mapP; exists i; first by rewrite mem_iota; lia.
      by rewrite !inE eqxx orbT.
    apply/or3P/Or33/mapP; exists i => //; rewrite mem_iota; lia.
  have [early|late] := ltnP i (warmup s).
    by apply/or3P/Or31/mapP; exists i => //; rewrite mem_iota; lia.
  apply/or3P/Or32/flatten_mapP; exists (i - warmup s); first by rewrite mem_iota; lia.
  by rewrite !inE; apply/orP; left; apply/eqP; congr (_, _); lia.
Qed.

(** 1F1B is free of deadlock: whatever the order in which the stages run, they run to the end. *)
Theorem one_f_one_b_never_stuck order a :
  let length (s : 'I_p) := len program s in
  let waits (s : 'I_p) k (q : 'I_p) := need program s k q in
  runs length waits (start _) order a -> maximal length waits a -> finished length a.
Proof.
apply: (@chain_never_stuck p program time).
- by move=> s; apply: times_climb.
- by move=> s q [[] i]; rewrite /user /time /=; have := ltn_ord s; have := ltn_ord q; lia.
- by move=> s q o _; rewrite !mem_program.
Qed.

(** Both ends of a channel name the messages in one order, as first-in first-out needs: the
    microbatches in turn, forwards and backwards each. *)
Theorem one_f_one_b_in_turn s (backward : bool) :
  [seq o <- program s | o.1 == backward] = [seq (backward, i) | i <- iota 0 m].
Proof.
have wm : warmup s <= m by rewrite /warmup geq_minr.
have pairs w a n : [seq o <- flatten [seq [:: F (w + i); B i] | i <- iota a n] | o.1 == backward] =
    [seq (backward, (if backward then 0 else w) + i) | i <- iota a n].
  by elim: n a => //= n IH a; case: backward IH => /= ->.
have ones (b : bool) a n : [seq o <- [seq (b, i) | i <- iota a n] | o.1 == backward] =
    if b == backward then [seq (b, i) | i <- iota a n] else [::].
  by rewrite filter_map /preim /=; case: (b == backward); rewrite ?filter_predT ?filter_pred0.
rewrite /program !filter_cat pairs !ones; case: backward {pairs ones} => /=.
- by rewrite -map_cat -iotaD subnK.
- rewrite cats0 -[in RHS](subnKC wm) iotaD map_cat; congr (_ ++ _).
  have -> : iota (0 + warmup s) (m - warmup s) = map (addn (warmup s)) (iota 0 (m - warmup s)).
    by rewrite -iotaDl addnC.
  by rewrite -map_comp.
Qed.

(** Every forward and backward runs once. *)
Theorem one_f_one_b_complete s : uniq (program s) /\ forall o, (o \in program s) = (o.2 < m).
Proof.
split; last exact: mem_program.
have other : [seq o <- program s | o.1 == false] = [seq o <- program s | ~~ (o.1 == true)].
  by apply: eq_filter => o; case: o.1.
have split_ : perm_eq (program s)
    ([seq o <- program s | o.1 == true] ++ [seq o <- program s | o.1 == false]).
  by rewrite other perm_sym; apply/permPl; apply: (perm_filterC (fun o : op => o.1 == true)).
rewrite (perm_uniq split_) !one_f_one_b_in_turn cat_uniq !map_inj_uniq ?iota_uniq ?andbT /=;
  try by move=> i j [].
by apply/hasPn => _ /mapP[i _ ->]; apply/negP => /mapP[].
Qed.

End OneFOneB.

(** Stages that exchange messages over first-in first-out channels.

    Claims: a step of one stage never disables another's and the order of two steps does not
    matter (the diamond); so all maximal runs end alike, and one run decides whether any run can
    get stuck; channels that hold more only help; a schedule with a clock never gets stuck.

    The state says how many batches each stage has posted. Stage s posts its next batch, number
    [at s], once every message of the batch before is complete: once each peer q has posted at least
    [need s (at s) q] batches. With first-in first-out channels the k-th send on a channel meets the
    k-th receive, so that such numbers say all: of a blocking send, the batch with the receive; of a
    receive, the batch with the send; of a send into a channel that holds c messages, the batch with
    the receive c places earlier. This is `mfun.schedule.rendezvous`. *)
From mathcomp Require Import all_ssreflect.
Set Implicit Arguments.
Unset Strict Implicit.
Unset Printing Implicit Defensive.

Section Network.
Variables (stage : finType) (len : stage -> nat).
Definition state := {ffun stage -> nat}.
Implicit Types (a b : state) (s t : stage).

Section Steps.
Variable need : stage -> nat -> stage -> nat.

Definition enabled a s := (a s < len s) && [forall q, need s (a s) q <= a q].
Definition post a s : state := [ffun q => if q == s then (a q).+1 else a q].

(** A run, as the stages in the order in which they post. *)
Fixpoint runs a (order : seq stage) b : Prop :=
  if order is s :: rest then enabled a s /\ runs (post a s) rest b else a = b.

Definition maximal a := forall s, ~~ enabled a s.

Lemma post_self a s : post a s s = (a s).+1.
Proof. by rewrite ffunE eqxx. Qed.

Lemma post_other a s t : t != s -> post a s t = a t.
Proof. by rewrite ffunE => /negPf ->. Qed.

Lemma post_grows a s q : a q <= post a s q.
Proof. by rewrite ffunE; case: eqP. Qed.

Theorem diamond a s t : s != t -> enabled a s -> enabled a t ->
  [/\ enabled (post a s) t, enabled (post a t) s & post (post a s) t = post (post a t) s].
Proof.
move=> st /andP[s1 /forallP s2] /andP[t1 /forallP t2]; split.
- rewrite /enabled post_other 1?eq_sym // t1 /=; apply/forallP => q.
  exact: leq_trans (t2 q) (post_grows a s q).
- rewrite /enabled post_other // s1 /=; apply/forallP => q.
  exact: leq_trans (s2 q) (post_grows a t q).
- apply/ffunP => q; rewrite !ffunE; case: (q =P t) => [->|_]; case: (_ =P s) => //.
Qed.

(** No run gets further, at any stage, than the end of a maximal one. *)
Theorem maximal_dominates a (end_ : state) order b :
  maximal end_ -> (forall q, a q <= end_ q) -> runs a order b -> forall q, b q <= end_ q.
Proof.
move=> stop; elim: order a => [|s rest IH] a below /=; first by move=> <-.
case=> /andP[s1 /forallP s2] go; apply: IH go => q; rewrite ffunE.
case: eqP => [->|//]; rewrite ltn_neqAle below andbT; apply/negP => /eqP same.
move/negP: (stop s); apply; rewrite /enabled -same s1 /=; apply/forallP => p.
exact: leq_trans (s2 p) (below p).
Qed.

Lemma runs_grow a order b : runs a order b -> forall q, a q <= b q.
Proof.
elim: order a => [|s rest IH] a /=; first by move=> ->.
by case=> _ /IH up q; apply: leq_trans (post_grows a s q) (up q).
Qed.

(** All maximal runs end in the same state. *)
Theorem confluence a o1 b1 o2 b2 :
  runs a o1 b1 -> maximal b1 -> runs a o2 b2 -> maximal b2 -> b1 = b2.
Proof.
move=> r1 m1 r2 m2; apply/ffunP => q; apply/eqP; rewrite eqn_leq.
rewrite (maximal_dominates m2 (runs_grow r2) r1) /=.
exact: (maximal_dominates m1 (runs_grow r1) r2).
Qed.

Definition finished a := forall s, a s = len s.

Lemma finished_maximal a : finished a -> maximal a.
Proof. by move=> done s; rewrite /enabled done ltnn. Qed.

Definition start : state := [ffun=> 0].

(** One run decides: if it finishes, no run ever gets stuck before the end. *)
Theorem one_run_decides o1 b1 o2 b2 :
  runs start o1 b1 -> finished b1 -> runs start o2 b2 -> maximal b2 -> finished b2.
Proof.
move=> r1 f1 r2 m2; rewrite -(confluence r1 (finished_maximal f1) r2 m2).
exact: f1.
Qed.

(** And if it gets stuck, no run ever finishes. *)
Theorem one_run_refutes o1 b1 o2 b2 :
  runs start o1 b1 -> maximal b1 -> ~ finished b1 -> runs start o2 b2 -> ~ finished b2.
Proof.
move=> r1 m1 f1 r2 f2; apply: f1.
by rewrite (confluence r1 m1 r2 (finished_maximal f2)).
Qed.

(** Every run is finite: it posts each batch once. *)
Theorem runs_length a order b :
  runs a order b -> \sum_q b q = size order + \sum_q a q.
Proof.
elim: order a => [|s rest IH] a /=; first by move=> ->.
case=> _ /IH ->; rewrite addSnnS; congr (_ + _).
rewrite (bigD1 s) //= post_self [in RHS](bigD1 s) //= addSn; congr (_ + _).+1.
by apply: eq_bigr => q; exact: post_other.
Qed.

Lemma runs_within a order b : (forall q, a q <= len q) -> runs a order b -> forall q, b q <= len q.
Proof.
elim: order a => [|s rest IH] a below /=; first by move=> <-.
by case=> /andP[s1 _]; apply: IH => q; rewrite ffunE; case: eqP => [->|].
Qed.

(** From every state some maximal run goes on. *)
Theorem maximal_exists a : (forall q, a q <= len q) -> exists order b, runs a order b /\ maximal b.
Proof.
have [left] := ubnP (\sum_q (len q - a q)); elim: left a => // left IH a small within.
case: (pickP (enabled a)) => [s go|stop]; last by exists [::], a; split=> // s; rewrite stop.
case/andP: (go) => s1 _.
have within' q : post a s q <= len q by rewrite ffunE; case: eqP => [->|].
have [|order [b [r m]]] := IH (post a s) _ within'.
  rewrite ltnS in small; apply: leq_trans small.
  rewrite (bigD1 s) //= [X in _ < X](bigD1 s) //= post_self.
  rewrite (eq_bigr (fun q => len q - a q)); last by move=> q ?; rewrite post_other.
  by rewrite ltn_add2r subnS prednK // subn_gt0.
by exists (s :: order), b.
Qed.

(** A clock: batch k of stage s is posted at time [clock s k], later than the stage's batch before
    it and than the batches that it needs. Then nothing ever gets stuck. *)
Theorem clocked_never_stuck (clock : stage -> nat -> nat) :
  (forall s k l, k < l < len s -> clock s k < clock s l) ->
  (forall s k q, k < len s -> need s k q <= len q) ->
  (forall s k q, k < len s -> 0 < need s k q -> clock q (need s k q).-1 < clock s k) ->
  forall order a, runs start order a -> maximal a -> finished a.
Proof.
move=> later inside needed order a r stop.
have within : forall q, a q <= len q by apply: runs_within r => q; rewrite ffunE.
have none now s : clock s (a s) < now -> a s < len s -> False.
  elim: now s => // now IH s below open.
  have := stop s; rewrite /enabled open /= negb_forall => /existsP[q]; rewrite -ltnNge => short.
  have pos : 0 < need s (a s) q by apply: leq_ltn_trans short.
  have fits := inside s (a s) q open.
  apply: (IH q); last exact: leq_trans short fits.
  apply: leq_trans (_ : clock s (a s) <= now); last by rewrite -ltnS.
  apply: leq_ltn_trans (needed s (a s) q open pos).
  have : a q <= (need s (a s) q).-1 by rewrite -ltnS prednK.
  rewrite leq_eqVlt => /orP[/eqP <- //|before]; apply: ltnW; apply: later.
  by rewrite before prednK.
move=> s; apply/eqP; rewrite eqn_leq within leqNgt; apply/negP.
exact: (none (clock s (a s)).+1 s (ltnSn _)).
Qed.

End Steps.

(** Channels that hold more, or a transport that waits for less: what finishes still finishes. *)
Theorem waiting_for_less (need less : stage -> nat -> stage -> nat) o1 b1 o2 b2 :
  (forall s k q, less s k q <= need s k q) ->
  runs need start o1 b1 -> finished b1 ->
  runs less start o2 b2 -> maximal less b2 -> finished b2.
Proof.
move=> fewer r1; suff r1' : runs less start o1 b1 by apply: one_run_decides r1'.
elim: o1 start r1 => //= s rest IH a [/andP[s1 /forallP s2] r1]; split; last exact: IH.
rewrite /enabled s1 /=; apply/forallP => q; exact: leq_trans (fewer s (a s) q) (s2 q).
Qed.

End Network.

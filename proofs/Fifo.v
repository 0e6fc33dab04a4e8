(** The same with the channels themselves: queues that hold up to [room] messages.

    Claims: two steps of different stages can be taken in either order, with one result; so all
    maximal runs end in one state, and what a stage receives does not depend on the order. Every
    channel has one writer and one reader. *)
From mathcomp Require Import all_ssreflect.
Set Implicit Arguments.
Unset Strict Implicit.
Unset Printing Implicit Defensive.

Section Fifo.
Variables (stage channel : finType) (message : Type).
Variables (writer reader : channel -> stage) (room : channel -> nat).

Inductive op := Send of channel & message | Receive of channel | Compute.

(** What a stage has left to do and what it has received (latest first), and every queue. *)
Record state := State {
  todo : {ffun stage -> seq op};
  got : {ffun stage -> seq message};
  queue : {ffun channel -> seq message} }.
Implicit Types (a : state) (s t : stage).

Definition put (I : finType) (A : Type) (f : {ffun I -> A}) (i : I) (x : A) : {ffun I -> A} :=
  [ffun j => if j == i then x else f j].

(** The one step that a stage can take, if it can. *)
Definition step a s : option state :=
  match todo a s with
  | Send c m :: rest =>
      if (writer c == s) && (size (queue a c) < room c)
      then Some (State (put (todo a) s rest) (got a) (put (queue a) c (rcons (queue a c) m)))
      else None
  | Receive c :: rest =>
      if (reader c == s)
      then if queue a c is m :: more
           then Some (State (put (todo a) s rest) (put (got a) s (m :: got a s)) (put (queue a) c more))
           else None
      else None
  | Compute :: rest => Some (State (put (todo a) s rest) (got a) (queue a))
  | [::] => None
  end.

Lemma put_swap (I : finType) (A : Type) (f : {ffun I -> A}) i j x y :
  i != j -> put (put f i x) j y = put (put f j y) i x.
Proof.
move=> ij; apply/ffunP => k; rewrite !ffunE.
by case: (k =P j) => [->|//]; rewrite eq_sym (negPf ij).
Qed.

Lemma put_same (I : finType) (A : Type) (f : {ffun I -> A}) i x y :
  put (put f i x) i y = put f i y.
Proof. by apply/ffunP => k; rewrite !ffunE; case: eqP. Qed.

Lemma put_at (I : finType) (A : Type) (f : {ffun I -> A}) i x : put f i x i = x.
Proof. by rewrite ffunE eqxx. Qed.

Lemma put_off (I : finType) (A : Type) (f : {ffun I -> A}) i j x : j != i -> put f i x j = f j.
Proof. by rewrite ffunE => /negPf ->. Qed.

(** The cases: the first sends, or neither does. *)
Lemma send_then a s t b c ch m rest : s != t -> todo a s = Send ch m :: rest ->
  step a s = Some b -> step a t = Some c ->
  exists d, step b t = Some d /\ step c s = Some d.
Proof.
move=> st; have ts : t != s by rewrite eq_sym.
rewrite {1}/step => Es; rewrite {1}/step Es; case: ifP => // /andP[/eqP ws rs] [<-].
case Et: (todo a t) => [//|[ch2 m2|ch2|] rest2].
- case: ifP => // /andP[/eqP wt rt] [<-].
  have other : ch2 != ch by apply: contra_neq st => same; rewrite -ws -wt same.
  have other' : ch != ch2 by rewrite eq_sym.
  rewrite /step /= (put_off _ _ ts) (put_off _ _ st) Et Es /=.
  rewrite (put_off _ _ other) (put_off _ _ other') ws wt !eqxx rs rt /=.
  eexists; split; first reflexivity.
  by rewrite (put_swap _ _ _ st) (put_swap _ _ _ other').
- case: ifP => // /eqP rt; case Eq: (queue a ch2) => [//|x more] [<-].
  rewrite /step /= (put_off _ _ ts) (put_off _ _ st) Et Es /=.
  have [same|other] := eqVneq ch2 ch.
    subst ch2; have fits : size more < room ch by rewrite Eq in rs; apply: ltnW.
    rewrite !put_at Eq ws rt !eqxx fits /=.
    eexists; split; first reflexivity.
    by rewrite (put_swap _ _ _ st) !put_same.
  have other' : ch != ch2 by rewrite eq_sym.
  rewrite (put_off _ _ other) (put_off _ _ other') ws rt !eqxx rs Eq /=.
  eexists; split; first reflexivity.
  by rewrite (put_swap _ _ _ st) (put_swap _ _ _ other').
- case=> <-; rewrite /step /= (put_off _ _ ts) (put_off _ _ st) Et Es /= ws eqxx rs /=.
  eexists; split; first reflexivity.
  by rewrite (put_swap _ _ _ st).
Qed.

Lemma no_send_then a s t b c : s != t ->
  (if todo a s is Send _ _ :: _ then False else True) ->
  (if todo a t is Send _ _ :: _ then False else True) ->
  step a s = Some b -> step a t = Some c ->
  exists d, step b t = Some d /\ step c s = Some d.
Proof.
move=> st; have ts : t != s by rewrite eq_sym.
rewrite {1 2}/step.
case Es: (todo a s) => [|[//|ch|] rest]; case Et: (todo a t) => [|[//|ch2|] rest2] //= _ _.
- case: ifP => // /eqP rs; case Eq: (queue a ch) => [//|x more] [<-].
  case: ifP => // /eqP rt; case Eq2: (queue a ch2) => [//|y more2] [<-].
  have other : ch2 != ch by apply: contra_neq st => same; rewrite -rs -rt same.
  have other' : ch != ch2 by rewrite eq_sym.
  rewrite /step /= !(put_off _ _ ts) !(put_off _ _ st) Et Es /=.
  rewrite (put_off _ _ other) (put_off _ _ other') rs rt !eqxx Eq Eq2 /=.
  eexists; split; first reflexivity.
  by rewrite (put_swap _ _ _ st) (put_swap (got a) _ _ st) (put_swap _ _ _ other').
- case: ifP => // /eqP rs; case Eq: (queue a ch) => [//|x more] [<-] [<-].
  rewrite /step /= (put_off _ _ ts) (put_off _ _ st) Et Es /= rs eqxx Eq.
  eexists; split; first reflexivity.
  by rewrite (put_swap _ _ _ st).
- case=> <-; case: ifP => // /eqP rt; case Eq2: (queue a ch2) => [//|y more2] [<-].
  rewrite /step /= (put_off _ _ ts) (put_off _ _ st) Et Es /= rt eqxx Eq2.
  eexists; split; first reflexivity.
  by rewrite (put_swap _ _ _ st).
- case=> <- [<-]; rewrite /step /= (put_off _ _ ts) (put_off _ _ st) Et Es.
  eexists; split; first reflexivity.
  by rewrite (put_swap _ _ _ st).
Qed.

(** Two stages that can both take a step: in either order, with one result. *)
Theorem fifo_diamond a s t b c : s != t -> step a s = Some b -> step a t = Some c ->
  exists d, step b t = Some d /\ step c s = Some d.
Proof.
move=> st sb tc; have ts : t != s by rewrite eq_sym.
case Es: (todo a s) => [|[ch m|ch|] rest]; first by rewrite /step Es in sb.
- exact: send_then Es sb tc.
all: case Et: (todo a t) => [|[ch2 m2|ch2|] rest2]; try by rewrite /step Et in tc.
all: try by have [d [? ?]] := send_then ts Et tc sb; exists d.
all: by apply: (no_send_then st _ _ sb tc); rewrite ?Es ?Et.
Qed.

(** A run, and where runs end. *)
Fixpoint runs a (order : seq stage) b : Prop :=
  if order is s :: rest then exists2 c, step a s = Some c & runs c rest b else a = b.

Definition maximal a := forall s, step a s = None.

(** A step that can be taken stays in any run that ends: it can be taken first. *)
Lemma step_first a s b order e : step a s = Some b -> runs a order e -> maximal e ->
  exists order', size order' < size order /\ runs b order' e.
Proof.
elim: order a b => [|t rest IH] a b sb /=; first by move=> <- /(_ s); rewrite sb.
case=> c tc r stop; have [same|st] := eqVneq s t.
  by exists rest; split=> //; move: tc; rewrite -same sb => -[->].
have [d [td sd]] := fifo_diamond st sb tc.
have [order' [shorter r']] := IH _ _ sd r stop.
by exists (t :: order'); split; rewrite ?ltnS //; exists d.
Qed.

(** All maximal runs end in one state: the same is left to do, and every stage has received the
    same messages. *)
Theorem fifo_confluence a o1 b1 o2 b2 :
  runs a o1 b1 -> maximal b1 -> runs a o2 b2 -> maximal b2 -> b1 = b2.
Proof.
elim: o1 a o2 => [|s rest IH] a o2 /=.
  move=> -> stop; case: o2 => [//|t rest] /= [c tc _].
  by rewrite stop in tc.
case=> b sb r1 m1 r2 m2.
have [o2' [_ r2']] := step_first sb r2 m2.
exact: IH r1 m1 r2' m2.
Qed.

End Fifo.

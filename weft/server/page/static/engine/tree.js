// The prefix cache as an icicle. A click shows a node's users, and offers to pin or forget it.

import { $, button, el, isFilm, join, listOf, num, plural, put, read, tell } from "../parts.js";
import * as engines from "./engines.js";
import * as story from "./story.js";

const DEPTH = 9;
const THIN = 0.0035; // share of the width below which a node is not drawn
const MOST_USERS = 8; // listed

const box = $("tree");
let tree = null;
let places = []; // of the drawn nodes
let chosen = null; // number of the chosen node
const draw = listOf(box, (number) => button("", () => choose(number)), (node, i) => place(node, places[i]));
const drawAll = () => draw(places.map((one) => one.number));

export function show(seen) {
	tree = seen;
	const total = Math.max(tree.below.reduce((sum, below, i) => (tree.parent[i] < 0 ? sum + below : sum), 0), 1);
	const whole = tree.whole ? "" : " seen, there are more";
	const words = `${num(total)} tokens in ${plural(tree.nodes, "node")}${whole} · width: tokens, brightness: last use`;
	tell("tree-text", tree.parent.length ? words : "nothing is cached");
	places = layOut(total);
	box.style.setProperty("--depth", Math.max(...places.map((one) => one.y + 1), 1));
	drawAll();
}

function layOut(total) {
	const all = [];
	const oldest = Math.max(...tree.age, 1);
	let top = 0; // top of the next tree
	tree.parent.forEach((parent, i) => {
		const above = all[parent];
		const w = tree.below[i] / total;
		const x = above ? above.next : top;
		if (above) above.next += w;
		else top += w;
		// The root of a namespace is empty: its children take its line.
		const y = tree.tokens[i] ? (above?.y ?? -1) + 1 : -1;
		const b = (1 - tree.age[i] / oldest).toFixed(1);
		all.push({ i, number: tree.node[i], x, y, w, b, next: x });
	});
	return all.filter(({ w, y }) => w >= THIN && y >= 0 && y < DEPTH);
}

function place(node, spot) {
	const { i, number } = spot;
	for (const sign of ["x", "y", "w", "b"]) node.style.setProperty("--" + sign, spot[sign]);
	const text = tree.text[i];
	node.classList.toggle("used", tree.locks[i]);
	node.classList.toggle("kept", tree.pins[i]);
	put(node, text.replaceAll("\n", "⏎"));
	const words = join(
		plural(tree.tokens[i], "token"), `${num(tree.below[i])} with all below`,
		tree.locks[i] && "in use", tree.pins[i] && "pinned",
		tree.age[i] ? `last used ${plural(tree.age[i], "use")} of the cache ago` : "used last of all",
	);
	node.title = words + "\n" + text + (tree.tokens[i] > 32 ? " …" : "");
	node.ariaPressed = chosen === number;
	if (isFilm && chosen === number) tell("node", node.title);
}

// ---- the chosen node

function choose(number) {
	chosen = chosen === number ? null : number;
	$("node").hidden = chosen === null;
	drawAll();
	if (!isFilm && chosen !== null) ask("cache/prefix?node=" + chosen).then(describe, (error) => tell("node", error.message));
}

const ask = (path, body) => read(path, "admin", body, { "x-data-parallel-rank": engines.shown().rank });

function describe({ node, text, tokens, before, hits, requests, pins }) {
	const facts = join(`${plural(tokens, "token")} behind ${num(before)}`, `${plural(hits, "request")} began with it`, pins.length && "kept by " + pins.join(", "));
	const acts = el("p", "after",
		act("Pin", "cache/pin", { node }, (made) => "pinned as " + made.name),
		act("Forget", "cache/forget", { node, keep: before }, (gone) => join(plural(gone.tokens, "token") + " forgotten", gone.left > before && "the rest is in use", gone.message)),
		...requests.slice(0, MOST_USERS).map((rid) => button(rid, () => story.open(rid))),
	);
	$("node").replaceChildren(el("p", "facts", facts), el("pre", "", text), acts);
}

// A button that sends a request; the outcome replaces all buttons.
function act(name, path, body, told) {
	const made = button(name, async () => {
		const words = await ask(path, body).then(told, (error) => error.message);
		made.parentElement.replaceChildren(words);
	});
	return made;
}

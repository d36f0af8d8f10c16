// The prefix cache as an icicle.

import { $, button, listOf, num, plural, put, tell } from "./parts.js";

const DEPTH = 9;
const THIN = 0.0035; // share of the width below which a node is not drawn

const box = $("tree");
let tree = null;
let places = []; // of the nodes that are drawn
let chosen = "";
const draw = listOf(box, (name) => button("", () => choose(name)), (node, i) => place(node, places[i]));

export function show(seen) {
	tree = seen;
	const total = Math.max(tree.below.reduce((sum, below, i) => (tree.parent[i] < 0 ? sum + below : sum), 0), 1);
	const whole = tree.whole ? "" : " seen, there are more";
	const words = `${num(total)} tokens in ${plural(tree.nodes, "node")}${whole} · width: tokens, brightness: last use`;
	tell("tree-text", tree.parent.length ? words : "nothing is cached");
	places = layOut(total);
	box.style.setProperty("--depth", Math.max(...places.map((one) => one.y + 1), 1));
	draw(places.map((one) => one.name));
}

function layOut(total) {
	const all = [];
	const names = new Set();
	const oldest = Math.max(...tree.age, 1);
	let top = 0; // where the next tree begins
	tree.parent.forEach((parent, i) => {
		const above = all[parent];
		const width = tree.below[i] / total;
		const x = above ? above.next : top;
		if (above) above.next += width;
		else top += width;
		// The top of a namespace holds nothing: what is below it takes its line.
		const isEmpty = !tree.tokens[i];
		let name = isEmpty ? "n" + i : (above?.name || "") + "/" + tree.text[i].slice(0, 48);
		const y = isEmpty ? -1 : (above?.y ?? -1) + 1;
		const isDrawn = !isEmpty && width >= THIN && y < DEPTH;
		while (isDrawn && names.has(name)) name += "'";
		if (isDrawn) names.add(name);
		const b = (1 - tree.age[i] / oldest).toFixed(1);
		all.push({ i, name, x, y, w: width, b, next: x, isDrawn });
	});
	return all.filter((one) => one.isDrawn);
}

function place(node, spot) {
	const { i, name } = spot;
	for (const sign of ["x", "y", "w", "b"]) node.style.setProperty("--" + sign, spot[sign]);
	const text = tree.text[i];
	node.classList.toggle("used", tree.locks[i]);
	node.classList.toggle("kept", tree.pins[i]);
	put(node, text.replaceAll("\n", "⏎"));
	let words = `${plural(tree.tokens[i], "token")}, ${num(tree.below[i])} with all below`;
	if (tree.locks[i]) words += `, used by ${plural(tree.locks[i], "request")}`;
	if (tree.pins[i]) words += ", pinned";
	words += tree.age[i] ? `, last used ${plural(tree.age[i], "use")} of the cache ago` : ", used last of all";
	node.title = words + "\n" + text + (tree.tokens[i] > 32 ? " …" : "");
	node.ariaLabel = `${text.slice(0, 60)}: ${words}`;
	node.ariaPressed = chosen === name;
	if (chosen === name) tell("node", node.title);
}

function choose(name) {
	chosen = chosen === name ? "" : name;
	$("node").hidden = !chosen;
	draw(places.map((one) => one.name));
}

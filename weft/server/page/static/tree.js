// The prefix cache as an icicle: a node is as wide as all that is cached below it, and as bright as
// its last use is near. Its text is text, whoever wrote it.

import { $, el, num, plural } from "./parts.js";

const DEPTH = 9;
const THIN = 0.0035; // share of the width below which a node is not drawn

export class Tree {
	constructor() {
		this.box = $("tree");
		this.nodes = new Map();
		this.chosen = "";
		this.none();
	}

	none() {
		$("tree-text").textContent = "nothing is cached";
	}

	show(tree) {
		const count = tree.parent.length;
		if (!count) {
			this.box.replaceChildren();
			this.nodes.clear();
			this.none();
			return;
		}
		const total = sum(tree, -1);
		const whole = tree.whole ? "" : " seen, there are more";
		$("tree-text").textContent = `${num(total)} tokens in ${plural(tree.nodes, "node")}${whole} · width: tokens, brightness: last use`;
		const oldest = Math.max(...tree.age, 1);
		const left = new Array(count).fill(0); // where the next child begins
		const x = new Array(count).fill(0);
		const depth = new Array(count).fill(0);
		const key = new Array(count).fill("");
		let top = 0;
		let deepest = 0;
		const kept = new Set();
		for (let i = 0; i < count; i++) {
			const parent = tree.parent[i];
			const isRoot = !tree.tokens[i];
			if (parent < 0) {
				x[i] = top;
				top += tree.below[i] / total;
			} else {
				x[i] = left[parent];
				left[parent] += tree.below[i] / total;
				depth[i] = depth[parent] + 1;
			}
			left[i] = x[i];
			// The top of a namespace holds nothing: what is below it takes its line.
			if (isRoot) {
				depth[i] = -1;
				key[i] = "n" + i;
				continue;
			}
			key[i] = (parent < 0 ? "" : key[parent]) + "/" + tree.text[i].slice(0, 48);
			const width = tree.below[i] / total;
			if (width < THIN || depth[i] >= DEPTH) continue;
			deepest = Math.max(deepest, depth[i] + 1);
			while (kept.has(key[i])) key[i] += "'";
			kept.add(key[i]);
			this.place(key[i], tree, i, x[i], width, depth[i], 1 - tree.age[i] / oldest);
		}
		this.box.style.setProperty("--depth", deepest);
		for (const [name, node] of this.nodes) {
			if (kept.has(name)) continue;
			node.remove();
			this.nodes.delete(name);
		}
	}

	place(name, tree, i, x, width, depth, bright) {
		let node = this.nodes.get(name);
		if (!node) {
			node = el("button");
			node.type = "button";
			node.addEventListener("click", () => this.choose(name));
			this.nodes.set(name, node);
			this.box.append(node);
		}
		for (const [sign, value] of [["--x", x], ["--w", width], ["--y", depth], ["--b", bright]]) {
			node.style.setProperty(sign, value.toFixed(5));
		}
		const text = tree.text[i];
		const isSlim = width * this.box.clientWidth < 26;
		node.className = [isSlim && "slim", tree.locks[i] && "used", tree.pins[i] && "kept"].filter(Boolean).join(" ");
		node.textContent = isSlim ? "" : text.replaceAll("\n", "⏎");
		let words = `${plural(tree.tokens[i], "token")}, ${num(tree.below[i])} with all below`;
		if (tree.locks[i]) words += `, used by ${plural(tree.locks[i], "request")}`;
		if (tree.pins[i]) words += ", pinned";
		words += tree.age[i] ? `, last used ${plural(tree.age[i], "use")} of the cache ago` : ", used last of all";
		node.said = words + "\n" + text + (tree.tokens[i] > 32 ? " …" : "");
		node.title = node.said;
		node.setAttribute("aria-label", `${text.slice(0, 60)}: ${words}`);
		node.setAttribute("aria-pressed", String(this.chosen === name));
		if (this.chosen === name) $("node").textContent = node.said;
	}

	choose(name) {
		this.chosen = this.chosen === name ? "" : name;
		for (const [other, node] of this.nodes) node.setAttribute("aria-pressed", String(other === this.chosen));
		const node = this.nodes.get(this.chosen);
		$("node").hidden = !node;
		if (node) $("node").textContent = node.said;
	}
}

function sum(tree, parent) {
	let found = 0;
	tree.parent.forEach((above, i) => { if (above === parent) found += tree.below[i]; });
	return Math.max(found, 1);
}

// A block of code: its lines in parts that a browser lays out only when they are near the screen,
// its colours as soon as it is complete, and a button that copies it.

import { copier, el } from "../parts.js";

const PART = 80; // lines
const LONGEST = 200_000; // characters that are coloured

let library = null;

const colours = () => library ??= import("../vendor/highlight.js").then((found) => found.default);

// A block that grows by `set` until `end`, which returns its node.
export function codeBlock(text, lang = "") {
	const language = (lang || "").trim().split(/[\s{,]/)[0].toLowerCase();
	const code = el("code");
	const pre = el("pre", "", code);
	const made = el("figure", "code", el("figcaption", "", el("small", "", language || "text"), copier("Copy", () => source)), pre);
	pre.tabIndex = 0;
	let source = "";
	const block = {
		made,
		set(all) {
			if (all.startsWith(source)) grow(code, all.slice(source.length));
			else fill(code, [["", all]]);
			source = all;
		},
		end() {
			if (language && source.length < LONGEST) colour(code, source, language);
			return made;
		},
	};
	block.set(text);
	return block;
}

function colour(code, source, language) {
	colours().then((library) => {
		if (!library.getLanguage(language)) return;
		const { _emitter: found } = library.highlight(source, { language, ignoreIllegals: true });
		fill(code, pieces(found.rootNode, ""));
	}).catch(() => {}); // it stays without colours
}

// The texts of a tree, each with its class.
function* pieces({ children, scope }, outer) {
	const kind = scope ? "hl-" + scope.split(".")[0] : outer;
	for (const child of children) {
		if (typeof child === "string") yield [kind, child];
		else yield* pieces(child, kind);
	}
}

function fill(code, all) {
	code.replaceChildren();
	for (const [kind, text] of all) grow(code, text, kind);
}

// Parts are blocks, so the newline between two of them is not part of their texts.
function grow(code, text, kind = "") {
	let part = code.lastChild;
	text.split("\n").forEach((line, i) => {
		if (i) {
			if (part.lines >= PART) part = null;
			else {
				part.lines++;
				line = "\n" + line;
			}
		}
		if (!part) {
			part = el("span", "part");
			part.lines = 1;
			code.append(part);
		}
		if (!line) return;
		const last = part.lastChild;
		if (kind) part.append(el("span", kind, line));
		else if (last?.nodeType === Node.TEXT_NODE) last.appendData(line);
		else part.append(line);
	});
}

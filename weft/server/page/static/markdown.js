// The Markdown that models write, as nodes: headings, lists, code, bold, italic. Nothing of it is
// ever read as HTML, and no address becomes a link.

import { el } from "./parts.js";

const INLINE = /(`+)([\s\S]+?)\1|\*\*([^*\n]+)\*\*|\*([^*\n]+)\*/g;

function inline(into, text) {
	let from = 0;
	for (const match of text.matchAll(INLINE)) {
		into.append(text.slice(from, match.index));
		if (match[2] !== undefined) into.append(el("code", "", match[2]));
		else if (match[3] !== undefined) into.append(el("b", "", match[3]));
		else into.append(el("em", "", match[4]));
		from = match.index + match[0].length;
	}
	into.append(text.slice(from));
	return into;
}

export function nodes(text) {
	const made = [];
	let list = null;
	let lines = [];
	const flush = () => {
		if (lines.length) made.push(inline(el("p"), lines.join("\n")));
		lines = [];
	};
	const parts = text.split("\n");
	for (let i = 0; i < parts.length; i++) {
		const line = parts[i];
		const fence = line.match(/^\s*(```+|~~~+)/);
		const item = line.match(/^\s*([-*]|\d+[.)])\s+(.*)/);
		const heading = line.match(/^#{1,6}\s+(.*)/);
		if (fence) {
			flush();
			list = null;
			const code = [];
			while (++i < parts.length && !parts[i].trim().startsWith(fence[1])) code.push(parts[i]);
			const box = el("pre");
			box.append(el("code", "", code.join("\n")));
			made.push(box);
		} else if (item) {
			flush();
			const kind = /\d/.test(item[1]) ? "ol" : "ul";
			if (!list || list.localName !== kind) made.push(list = el(kind));
			list.append(inline(el("li"), item[2]));
		} else if (heading) {
			flush();
			list = null;
			made.push(inline(el("h3"), heading[1]));
		} else if (!line.trim()) {
			flush();
			list = null;
		} else {
			list = null;
			lines.push(line);
		}
	}
	flush();
	return made;
}

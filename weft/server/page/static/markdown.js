// A model's Markdown as nodes: none of it is parsed as HTML, no address becomes a link.

import { el } from "./parts.js";

const INLINE = /(`+)(?<code>[\s\S]+?)\1|\*\*(?<b>[^*\n]+)\*\*|\*(?<em>[^*\n]+)\*/g;

function inline(tag, text) {
	const made = el(tag);
	let from = 0;
	for (const match of text.matchAll(INLINE)) {
		const [kind, words] = Object.entries(match.groups).find(([, found]) => found);
		made.append(text.slice(from, match.index), el(kind, "", words));
		from = match.index + match[0].length;
	}
	made.append(text.slice(from));
	return made;
}

export function nodes(text) {
	const made = [];
	let list = null;
	let lines = [];
	const end = () => {
		if (lines.length) made.push(inline("p", lines.join("\n")));
		lines = [];
		list = null;
	};
	const all = text.split("\n");
	for (let i = 0; i < all.length; i++) {
		const line = all[i];
		const fence = line.match(/^\s*(```+|~~~+)/);
		const item = line.match(/^\s*([-*]|\d+[.)])\s+(.*)/);
		const heading = line.match(/^#{1,6}\s+(.*)/);
		if (fence) {
			end();
			const code = [];
			while (++i < all.length && !all[i].trim().startsWith(fence[1])) code.push(all[i]);
			made.push(el("pre", "", el("code", "", code.join("\n"))));
		} else if (item) {
			const kind = /\d/.test(item[1]) ? "ol" : "ul";
			if (list?.localName !== kind) {
				end();
				made.push(list = el(kind));
			}
			list.append(inline("li", item[2]));
		} else if (heading) {
			end();
			made.push(inline("h3", heading[1]));
		} else if (!line.trim()) {
			end();
		} else {
			list = null;
			lines.push(line);
		}
	}
	end();
	return made;
}

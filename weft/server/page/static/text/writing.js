// An answer that grows: what cannot change any more is drawn once, and only the last block is
// drawn again, so the work for a piece does not grow with the answer.
//
//   text     |........ settled ........|.... last block ....|
//   nodes    |... stay as they are ....|..... the tail .....|

import { el } from "../parts.js";
import { blocks, item, node, row, tableOf } from "./markdown.js";
import { codeBlock } from "./code.js";

const STRETCH = 40; // blocks that a browser lays out together, when they are near the screen
const MOST_ITEMS = 30; // of a list or table in the tail
const LONGEST = 4_000; // characters of a paragraph in the tail
const FENCE = /^ {0,3}(`{3,}|~{3,})([^\n]*)\n/;

export class Writing {
	#box;
	#settled = 0; // characters
	#prefix = ""; // stands before the rest of the text: the head of an open table
	#open = null; // the list or table to which the first block belongs
	#code = null; // the open block of code: { block, from, end }
	#tail = [];

	constructor(box) {
		this.#box = box;
	}

	// Draws all of the text so far.
	write(text) {
		if (this.#code && !this.#goOn(text, false)) return;
		for (let before = -1; before !== this.#settled;) {
			before = this.#settled;
			this.#draw(text);
			if (this.#code && !this.#goOn(text, false)) return;
		}
	}

	// Draws the whole text, to which nothing is added any more.
	end(text) {
		this.write(text);
		if (this.#code) this.#goOn(text, true);
	}

	#draw(text) {
		const rest = text.slice(this.#settled);
		this.#drop();
		if (!rest) return;
		const found = blocks(this.#prefix + rest);
		const last = found.findLastIndex((token) => token.type !== "space");
		let end = this.#settled - this.#prefix.length;
		for (const token of found.slice(0, Math.max(last, 0))) {
			end += token.raw.length;
			this.#keep(token);
		}
		if (last > 0) {
			this.#settled = end;
			this.#prefix = "";
			this.#open = null;
		}
		if (last >= 0) this.#end(found[last], end);
	}

	#add(made) {
		if (!made.length) return;
		let stretch = this.#box.lastChild;
		if (!stretch || stretch.childElementCount >= STRETCH) {
			stretch = el("div", "stretch");
			this.#box.append(stretch);
		}
		stretch.append(...made);
	}

	#drop() {
		for (const one of this.#tail.splice(0)) one.remove();
	}

	#keep(token) {
		if (this.#open) this.#open.append(...this.#partsOf(token));
		else this.#add([node(token)].filter(Boolean));
		this.#open = null;
	}

	// The last block, which may still change, is settled as far as it is long.
	#end(token, from) {
		const fence = token.type === "code" && token.raw.match(FENCE);
		if (fence) return this.#begin(fence, from);
		if (token.type === "list" && token.items.length > MOST_ITEMS) {
			this.#part(token, this.#open || node({ ...token, items: [] }), from + token.raw.length - token.items.at(-1).raw.length);
		} else if (token.type === "table" && token.rows.length > MOST_ITEMS) {
			this.#rows(token, from);
		} else if (token.type === "paragraph" && token.raw.length > LONGEST) {
			this.#lines(token, from);
		} else if (this.#open) {
			this.#tail = this.#partsOf(token);
			if (token.type === "table") this.#open.show(...this.#tail);
			else this.#open.append(...this.#tail);
		} else {
			this.#tail = [node(token)].filter(Boolean);
			this.#add(this.#tail);
		}
	}

	#partsOf({ type, items, rows, ...token }) {
		if (type === "list") return items.map(item);
		if (type === "table") return rows.map((cells) => row(cells));
		return [node({ type, ...token })].filter(Boolean);
	}

	#part(token, open, end) {
		if (open !== this.#open) this.#add([open]);
		open.append(...token.items.slice(0, -1).map(item));
		this.#open = open;
		this.#settled = end;
	}

	#rows(token, from) {
		const lines = token.raw.split("\n");
		const head = lines.slice(0, 2).join("\n") + "\n";
		const ends = lines.slice(0, 2 + token.rows.length - 1).join("\n").length + 1;
		if (!this.#open) {
			this.#open = tableOf({ ...token, rows: [] });
			this.#add([this.#open.made]);
		}
		this.#open.append(...token.rows.slice(0, -1).map((cells) => row(cells)));
		this.#settled = from + ends;
		this.#prefix = head;
	}

	#lines(token, from) {
		const end = token.raw.lastIndexOf("\n", token.raw.length - 2) + 1;
		if (!end) {
			this.#tail = [node(token)];
			return this.#add(this.#tail);
		}
		const made = node(blocks(token.raw.slice(0, end))[0]);
		made.classList.add("goes-on");
		this.#add([made]);
		this.#settled = from + end;
	}

	// ---- code

	#begin([opening, marks, lang], from) {
		const block = codeBlock("", lang);
		this.#add([block.made]);
		this.#code = { block, from: from + opening.length, closing: new RegExp(`^ {0,3}${marks[0]}{${marks.length},}[ \\t]*(?:\\n|$)`, "m"), seen: from + opening.length };
	}

	// Returns whether the block has ended, or ends here.
	#goOn(text, isOver) {
		const { block, from, closing, seen } = this.#code;
		const start = Math.max(text.lastIndexOf("\n", seen - 1) + 1, from);
		const found = text.slice(start).match(closing);
		const isLast = found && start + found.index + found[0].length === text.length && !found[0].endsWith("\n");
		const end = found ? start + found.index : text.length;
		if (!found || (isLast && !isOver)) {
			// The marks of the end may go on to be something else: they are not shown yet.
			block.set(text.slice(from, end).replace(/\n$/, ""));
			this.#code.seen = end;
			if (!isOver) return false;
		}
		block.set(text.slice(from, end).replace(/\n$/, ""));
		block.end();
		this.#settled = found ? end + found[0].length : text.length;
		this.#code = null;
		return true;
	}
}
